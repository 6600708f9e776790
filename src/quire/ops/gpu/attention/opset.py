"""The ops of the op set that attend, on a GPU: over pages, over latents, over positions that an indexer chooses, and
inside a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.gpu.attention.decode_step import can_write_quantized, decode_step
from quire.ops.gpu.attention.indexer import choose_slots, write_index_key
from quire.ops.gpu.attention.kv_write import kv_write
from quire.ops.gpu.attention.mla_write import latent_write
from quire.ops.gpu.attention.pages import Scoring
from quire.ops.gpu.attention.self_attention import distance_args, self_attention
from quire.ops.gpu.batch import GpuBatch
from quire.ops.gpu.deferred import ColumnSlice, DeferredHeadLinear, DeferredRows, GpuValue, as_columns, materialize
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, Target, quantize_rows
from quire.ops.opset import Int32
from quire.ops.reference.rope import rotate_heads


class AttentionOps:
    """`OpSet` describes the ops."""

    device: torch.device
    _overlap: bool
    _distances: tuple[Int32, Tensor] | None = None  # the rows of a table as they were given, and on the device

    def write_kv(
        self,
        k: GpuValue,
        v: GpuValue,
        batch: GpuBatch,
        layer: int,
    ) -> None:
        """Deferred until q is known, which the same kernel rotates; or until it is clear that no query comes."""
        self._write_pending(batch)
        batch.pending_kv = layer, as_columns(k), as_columns(v)

    def _write_pending(self, batch: GpuBatch) -> None:
        """Write K and V that no query of this step attends to: an encoder leaves them to its decoder."""
        if batch.pending_kv is not None:
            layer, k, v = batch.pending_kv
            batch.pending_kv = None
            assert k.angles is None and k.norm is None
            places = batch.slots_of(layer), batch.cache.pages_of(layer)
            kv_write(k.stored(), k.stored(), v.tensor(), None, *places, overlap=self._overlap)

    def paged_attention(
        self,
        q: GpuValue,
        batch: GpuBatch,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> GpuValue:
        scoring = Scoring(scale, window, softcap, slopes, sinks, biases)
        if batch.pending_kv is None:  # the keys are those of a layer before
            return batch.attend(materialize(q).unflatten(1, (-1, head_dim)), layer, scoring, self._overlap).flatten(1)
        assert batch.pending_kv[0] == layer, "a layer's K and V are written before"
        (_, k, v), queries = batch.pending_kv, as_columns(q)
        batch.pending_kv = None
        if k.angles is not queries.angles:  # one of them was read, and is rotated by now
            k, queries = as_columns(k.tensor()), as_columns(queries.tensor())
        places = batch.slots_of(layer), batch.cache.pages_of(layer)
        heads = queries.stored(), k.stored(), v.tensor(), queries.angles, *places
        norms: dict[str, Any] = {}
        for name, columns in (("q_norm", queries), ("k_norm", k)):
            if columns.norm is not None:  # a single head was normed as a row
                norms |= {name: columns.norm.weight, "eps": columns.norm.eps}
        if batch.only_decodes and not batch.batch_invariant and biases is None:
            plan, is_new = batch.decode_plan(window, queries.size // head_dim)
            overlap = self._overlap and not is_new  # the kernel reads the plan before the one right before it has ended
            step = partial(decode_step, *heads, batch.runs_of(layer), plan, scoring, **norms, overlap=overlap)
            return self._defer_step(step, queries, head_dim) if batch.adapters is None else step().flatten(1)
        rotated = kv_write(*heads, **norms, overlap=self._overlap)
        return batch.attend(rotated, layer, scoring, self._overlap).flatten(1)

    def _defer_step(self, step: Callable[..., Tensor], q: ColumnSlice, head_dim: int) -> DeferredRows:
        """Plain rows, or quantized by the step itself where it can. (With adapters both would be wanted, and the step
        would run twice.)"""
        num_tokens = len(q.whole)

        def quantized(dtype: torch.dtype, group: int) -> QuantizedRows:
            if not can_write_quantized(num_tokens, q.size // head_dim, head_dim, dtype, group):
                return quantize_rows(rows.tensor(), dtype, group, self._overlap)
            target = Target.quantized(q.whole, q.size, dtype, group)
            step(target=target)
            return target.result

        rows = DeferredRows(num_tokens, lambda: step().flatten(1), quantized)
        return rows

    def cross_attention(self, q: GpuValue, batch: GpuBatch, layer: int, head_dim: int, scale: float) -> Tensor:
        assert batch.sources is not None, "the sequences of this step have no sources"
        return batch.sources.attend(self._heads(q, head_dim), layer, Scoring(scale)).flatten(1)

    def attention(
        self,
        q: GpuValue,
        k: GpuValue,
        v: GpuValue,
        batch: GpuBatch,
        head_dim: int,
        scale: float,
        causal: bool = False,
        window: int = 0,
        biases: Tensor | None = None,
    ) -> Tensor:
        queries, keys, values = (self._heads(x, head_dim) for x in (q, k, v))
        return self_attention(queries, keys, values, batch.runs, scale, causal, window, biases).flatten(1)

    def _heads(self, x: GpuValue, head_dim: int) -> Tensor:
        """[T, heads, head_dim], normed and rotated."""
        columns = as_columns(x)
        heads = columns.stored().unflatten(1, (-1, head_dim))
        if columns.norm is not None:
            heads = F.rms_norm(heads.float(), (head_dim,), columns.norm.weight, columns.norm.eps).to(heads.dtype)
        return heads if columns.angles is None else rotate_heads(heads, columns.angles)

    def disentangled_attention(
        self,
        q: GpuValue,
        k: GpuValue,
        v: GpuValue,
        by_query: GpuValue | DeferredHeadLinear,
        by_key: GpuValue | DeferredHeadLinear,
        rows: Int32,
        batch: GpuBatch,
        head_dim: int,
        scale: float,
    ) -> Tensor:
        queries, keys, values = (self._heads(x, head_dim) for x in (q, k, v))
        if self._distances is None or self._distances[0] is not rows:
            self._distances = rows, torch.from_numpy(rows).to(self.device)  # not while a graph is captured
        table = self._distances[1]
        distances = distance_args(materialize(by_query), materialize(by_key), queries.shape[1], table)
        return self_attention(queries, keys, values, batch.runs, scale, False, 0, distances=distances).flatten(1)

    def write_index_key(self, k: GpuValue, batch: GpuBatch, layer: int) -> None:
        columns = as_columns(k)
        assert columns.norm is None
        write_index_key(columns.stored(), columns.angles, batch.slots, batch.cache.index_keys[layer])

    def top_positions(self, q: GpuValue, weights: GpuValue, batch: GpuBatch, layer: int) -> Tensor:
        """The positions that score best, as slots of the cache, which are the same in all layers."""
        queries = as_columns(q)
        assert queries.norm is None
        page = batch.cache.index_keys[layer]
        return choose_slots(queries.stored(), materialize(weights), queries.angles, page, batch.seen_positions())

    def write_latent(self, latent: GpuValue, k_rope: ColumnSlice, batch: GpuBatch, layer: int) -> None:
        """Deferred until q is known, which the same kernel rotates."""
        assert batch.pending_kv is None, "a layer's latents are attended to before the next layer's are written"
        batch.pending_kv = layer, as_columns(latent), as_columns(k_rope)

    def mla_attention(
        self,
        q_latent: Tensor | DeferredHeadLinear,
        q_rope: ColumnSlice,
        batch: GpuBatch,
        layer: int,
        scale: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        assert batch.pending_kv is not None and batch.pending_kv[0] == layer, "a layer's latents are written before"
        _, latent, k_rope = batch.pending_kv
        batch.pending_kv = None
        spec, angles = batch.cache.spec, q_rope.angles
        assert k_rope.angles is angles, "q and k have the same angles"
        if angles is None:  # Kimi Linear: nothing is rotated
            half = (spec.head_dim - spec.latent) // 2
            angles = torch.ones(len(batch.slots), 2 * half, device=self.device)
            angles[:, half:] = 0.0
        num_heads = q_rope.size // (spec.head_dim - spec.latent)
        q = q_rope.whole.new_empty(len(batch.slots), num_heads, spec.head_dim)
        if isinstance(q_latent, DeferredHeadLinear):
            q_latent.write(q[..., : spec.latent])
        else:
            q[..., : spec.latent] = q_latent.unflatten(1, (num_heads, -1))
        page = batch.latent_page(layer)
        latent_write(
            latent.tensor(),
            k_rope.stored(),
            q_rope.stored(),
            angles,
            batch.slots,
            page,
            q,
            overlap=self._overlap,
        )
        return batch.attend_latent(q, layer, scale, chosen).flatten(1)

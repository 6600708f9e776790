"""The op set on an NVIDIA GPU: Triton kernels, and cuBLAS where many rows are multiplied.

Activations are bf16 or fp16 (or fp32, for comparisons). Ops return deferred values (deferred.py), so that neighbouring
ops become one kernel; nothing here synchronizes, so a forward pass can be captured in a CUDA graph."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import Unsupported
from quire.ops.gpu.activation import activate_and_mul, activate_and_mul_quantized
from quire.ops.gpu.attention.decode_step import can_write_quantized, decode_step
from quire.ops.gpu.attention.kv_write import kv_write
from quire.ops.gpu.attention.mla_write import latent_write
from quire.ops.gpu.attention.pages import Scoring
from quire.ops.gpu.attention.self_attention import self_attention
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.deferred import (
    ActivatedRows,
    ColumnSlice,
    DeferredConv,
    DeferredHeadLinear,
    DeferredRows,
    DeferredSum,
    GpuValue,
    HeadNorm,
    as_columns,
    materialize,
    num_rows_of,
)
from quire.ops.gpu.embedding import embedding
from quire.ops.gpu.head_norm import norm_heads
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.linear.dequantize import dequantize_rows
from quire.ops.gpu.linear.grouped import grouped_linear, wants_int16_input
from quire.ops.gpu.linear.grouped_gemv import x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.lora import GpuLoraSlots, add_lora
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, Target, quantize_rows
from quire.ops.gpu.linear.quantized_weights import ActOrderWeight, can_keep_quantized, load_quantized
from quire.ops.gpu.linear.scaled import ScaledWeight, scaled_linear
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.w4a8 import W4A8Weight, w4a8_linear
from quire.ops.gpu.moe.moe import moe_mlp
from quire.ops.gpu.moe.routing import route
from quire.ops.gpu.norm import (
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_quantized,
    layer_norm,
    rms_norm,
    rms_norm_quantized,
)
from quire.ops.gpu.pointwise import activate_elements, soft_cap_
from quire.ops.gpu.program import GpuProgram, dry_run_batch
from quire.ops.gpu.rope import rope_angles
from quire.ops.gpu.sampling.sampler import DeviceSampler
from quire.ops.gpu.states.opset import StateOps
from quire.ops.gpu.weights import QUANTIZERS, Segment, load_experts, load_floats, load_segments, quantization_for
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Activation, Float32, Int32, Keep, ProgramSpec, Routing
from quire.ops.reference.rope import Frequencies, rotate_heads
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor

GRAPH_BYTES = 3 * 2**29  # reserved for graphs and the sampler's tables, which are allocated after the pages
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class GpuOps(StateOps):
    def __init__(
        self,
        device: str = "cuda",
        dtype: str = "bfloat16",
        quantization: str | None = None,
        batch_invariant: bool = False,
        graphs: bool = True,
        overlap: bool = True,
        utilization: float = 0.9,  # the share of the device's memory that may be used
        threads: int | None = None,  # of the host: unused
    ) -> None:
        if quantization is not None and quantization not in QUANTIZERS:
            raise Unsupported(f"quantization `{quantization}`", f"use one of {', '.join(QUANTIZERS)}")
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise Unsupported(
                f"torch {torch.__version__} finds no GPU it can use",
                "see whether `nvidia-smi` lists one and its driver is new enough for this torch, or use device cpu",
            )
        self.quantization, self.batch_invariant, self.graphs = quantization, batch_invariant, graphs
        overlap = overlap and self.device.type == "cuda"
        self._gemm_options = {"batch_invariant": batch_invariant, "overlap": overlap, "tickets": new_tickets(device)}
        self._overlap = overlap
        self._ones: dict[int, Tensor] = {}  # by size: weights of norms that have none
        self._utilization = utilization

    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        segments = load_segments(parts, self.dtype, self.device, quantization_for(parts, self.quantization, keep))
        vector = torch.cat([self.vector(part) for part in bias]).to(self.dtype) if bias else None
        return PackedWeight(
            num_outputs=sum(part.num_rows for part in parts),
            num_inputs=parts[0].num_columns,
            nbytes=sum(segment.nbytes for segment in segments) + (vector.nbytes if vector is not None else 0),
            packed=segments,
            bias=vector,
        )

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        packed = load_experts(experts, self.dtype, self.device, self.quantization)
        num_outputs, num_inputs = sum(part.num_rows for part in experts[0]), experts[0][0].num_columns
        added = None if biases is None else torch.stack([torch.cat([*map(self.vector, parts)]) for parts in biases])
        return PackedExperts(len(experts), num_outputs, num_inputs, packed.nbytes, packed, added)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        num_outputs, num_inputs = heads[0].shape
        stacked = torch.empty(len(heads), num_outputs, num_inputs, dtype=self.dtype, device=self.device)
        for matrix, head in zip(stacked, heads, strict=True):
            matrix.copy_(load_floats(head, self.dtype, self.device))
        return PackedHeads(len(heads), num_outputs, num_inputs, stacked.nbytes, stacked)

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> GpuLoraSlots:
        return GpuLoraSlots(num_inputs, sizes, num_slots, max_rank, self.device, self.dtype)

    def vector(self, tensor: StoredTensor) -> Tensor:
        return load_floats(tensor, torch.float32, self.device)

    def table(self, tensor: StoredTensor) -> Tensor | GroupedWeight:
        quantized = load_quantized([tensor], self.device) if can_keep_quantized(tensor, self.dtype) else None
        return quantized if isinstance(quantized, GroupedWeight) else load_floats(tensor, self.dtype, self.device)

    def biases(self, table: Float32) -> Tensor:
        return torch.tensor(table, dtype=torch.float32, device=self.device).contiguous()

    def frequencies(self, inv_freq: Float32, scale: float) -> Frequencies:
        return Frequencies(torch.tensor(inv_freq, device=self.device), scale)

    def draft_vocabulary(self, tokens: Int32, vocab: int) -> tuple[Tensor, int]:
        return torch.tensor(tokens, dtype=torch.int64, device=self.device), vocab

    def new_hidden_states(self, num_rows: int, num_columns: int) -> GpuHiddenStates:
        return GpuHiddenStates(torch.zeros(num_rows, num_columns, dtype=self.dtype, device=self.device))

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> GpuCache:
        if spec.latent & (spec.latent - 1):
            raise Unsupported(f"latent vectors of {spec.latent} columns", "a GPU takes powers of two; use device cpu")
        return GpuCache(spec, num_blocks, num_host_blocks, str(self.device))

    def new_sampler(self, num_rows: int, vocab_size: int) -> DeviceSampler:
        return DeviceSampler(num_rows, vocab_size, self.device)

    def compile(self, forward: Callable[[Any, Any], Any], cache: KVCache, spec: ProgramSpec) -> GpuProgram:
        sampler, hidden = spec.sampler, spec.hidden
        assert isinstance(cache, GpuCache) and (sampler is None or isinstance(sampler, DeviceSampler))
        assert hidden is None or isinstance(hidden, GpuHiddenStates)
        if sampler is not None and self.graphs and self.device.type == "cuda":
            compile_ahead([partial(sampler.warm_up, self.dtype)])
            sampler.warm_up(self.dtype)
        return GpuProgram(
            partial(forward, self),
            cache,
            spec.max_tokens,
            spec.max_rows,
            spec.max_model_len,
            sampler=sampler,
            graphs=self.graphs and not spec.sources,
            batch_invariant=self.batch_invariant,
            tree_nodes=spec.tree_nodes,
            max_drafts=spec.max_drafts,
            hidden=hidden,
            agree=self._agree_on_sizes,
        )

    def _agree_on_sizes(self, sizes: list[int]) -> list[int]:
        """Which sizes of steps have CUDA graphs."""
        return sizes

    def room(
        self,
        forward: Callable[[Any, Any], Any],
        spec: KVSpec,
        max_tokens: int,
        sources: bool = False,
        hidden: GpuHiddenStates | None = None,
    ) -> int:
        """Bytes left for pages: this process's share of the device, less what it holds and the peak of a step."""
        program = GpuProgram(partial(forward, self), self.new_cache(spec, 1), max_tokens, 1, max_tokens, hidden=hidden)
        step = dry_run_batch([max_tokens], spec.block_size, sources)
        compile_ahead([partial(program.run, step)])
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        program.run(step)
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated() - held
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return max(int(free - (1 - self._utilization) * total) - peak - GRAPH_BYTES, 0)

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: TokenIds | Tensor, table: Tensor | GroupedWeight) -> Tensor:
        tokens, last = (ids.ids, ids.last) if isinstance(ids, TokenIds) else (ids, None)
        if isinstance(table, GroupedWeight):
            return dequantize_rows(tokens, table, self.dtype, last)
        return embedding(tokens, table, last=last)

    def rms_norm(self, x: GpuValue, weight: Tensor, eps: float, groups: int = 1) -> DeferredRows | ColumnSlice:
        if groups > 1:
            parts = materialize(x)
            return _rows(len(parts), partial(norm_heads, parts, weight, eps, len(weight) // groups), self._overlap)
        if isinstance(x, Tensor) and len(weight) < x.shape[1]:
            x = as_columns(x)
        if isinstance(x, ColumnSlice) and x.angles is not None:  # a norm after the rotation: no kernel has that order
            heads = rotate_heads(x.stored().unflatten(-1, (-1, len(weight))), x.angles).float()
            normed = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
            return as_columns(normed.to(x.whole.dtype).flatten(1))
        if isinstance(x, ColumnSlice) and len(weight) < x.size:
            assert x.norm is None
            return replace(x, norm=HeadNorm(weight, eps))
        x = x if isinstance(x, DeferredSum) else materialize(x)
        if isinstance(x, Tensor) or x.total is not None:
            rows = materialize(x)
            return DeferredRows(
                len(rows),
                partial(rms_norm, rows, weight, eps, self._overlap),
                lambda dtype, group: rms_norm_quantized(rows, weight, eps, dtype, group, self._overlap),
            )
        add_norm, quantized = partial(self._add_norm, x, weight, eps), partial(self._add_norm_quantized, x, weight, eps)
        return DeferredRows(len(x.y), add_norm, quantized)

    def _add_norm(self, x: DeferredSum, weight: Tensor, eps: float) -> Tensor:
        if x.total is not None:
            return rms_norm(x.total, weight, eps, self._overlap)
        normed, x.total = add_rms_norm(x.y, materialize(x.x), weight, eps, self._overlap)
        return normed

    def _add_norm_quantized(
        self, x: DeferredSum, weight: Tensor, eps: float, dtype: torch.dtype, group: int
    ) -> QuantizedRows:
        if x.total is not None:
            return rms_norm_quantized(x.total, weight, eps, dtype, group, self._overlap)
        normed, x.total = add_rms_norm_quantized(x.y, materialize(x.x), weight, eps, dtype, group, self._overlap)
        return normed

    def layer_norm(
        self,
        x: GpuValue,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        groups: int = 1,
    ) -> DeferredRows:
        plain = partial(self._layer_norm, x, weight, bias, eps) if groups == 1 else None
        norm = plain or partial(_layer_norm_of_groups, x, weight, bias, eps, groups)
        return _rows(num_rows_of(x), norm, self._overlap)

    def _layer_norm(
        self,
        x: GpuValue,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        if weight is None:
            weight = self._ones_of(materialize(x.x if isinstance(x, DeferredSum) else x).shape[1])
        if isinstance(x, DeferredSum) and x.total is None:
            normed, x.total = add_layer_norm(x.y, materialize(x.x), weight, bias, eps, self._overlap)
            return normed
        return layer_norm(materialize(x), weight, bias, eps, self._overlap)

    def _ones_of(self, size: int) -> Tensor:
        if size not in self._ones:
            self._ones[size] = torch.ones(size, device=self.device)
        return self._ones[size]

    def linear(self, x: GpuValue, w: PackedWeight) -> Tensor:
        x = x if isinstance(x, DeferredRows) else materialize(x)
        outputs, first = [], 0
        for segment, all_outputs in zip(w.packed, self._all_outputs(w), strict=True):
            size = num_outputs(segment)
            bias = None if w.bias is None else w.bias[first : first + size]
            outputs.append(self._gemm(x, segment, bias, all_outputs))
            first += size
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _all_outputs(self, w: PackedWeight) -> Sequence[int | None]:
        """Of the matrices that segments have some rows of. None: a segment has all."""
        return [None] * len(w.packed)

    def _gemm(self, x: Tensor | DeferredRows, w: Segment, bias: Tensor | None, all_outputs: int | None) -> Tensor:
        options = {**self._gemm_options, "all_outputs": all_outputs}
        if isinstance(w, ActOrderWeight):
            return self._gemm(materialize(x).index_select(1, w.order), w.weight, bias, all_outputs)
        if isinstance(w, ScaledWeight):
            quantized = self._quantize(x, w.q.dtype, 128 if w.by_blocks else 0)
            return scaled_linear(quantized, w, bias, self.dtype, **options)
        if isinstance(w, W4A8Weight):
            rows = self._quantize(x, torch.float8_e4m3fn, 0)
            return w4a8_linear(rows, w, bias, self.dtype, **options)
        if isinstance(w, GroupedWeight):
            num_rows = num_rows_of(x)
            in_int16 = wants_int16_input(num_rows, w, self.batch_invariant)
            input = self._quantize(x, torch.int16, x_group(w)) if in_int16 else materialize(x)
            return grouped_linear(input, w, bias, self.dtype, **options)
        return linear(materialize(x), w, bias, **options)

    def _quantize(self, x: Tensor | DeferredRows, dtype: torch.dtype, group: int) -> QuantizedRows:
        if isinstance(x, DeferredRows):
            return x.quantized(dtype, group)
        return quantize_rows(x, dtype, group, self._overlap)

    def adapt(self, y: Tensor, x: GpuValue, slots: GpuLoraSlots, batch: GpuBatch) -> Tensor:
        batch.adapts = True
        if (routing := batch.tokens_by_slot(slots.num_slots)) is None:
            return y
        return add_lora(y, materialize(x), slots, routing)

    def linear_heads(self, x: Tensor | ColumnSlice, w: PackedHeads) -> DeferredHeadLinear:
        return DeferredHeadLinear(materialize(x), w.packed, self.batch_invariant)

    def split(self, x: GpuValue, sizes: Sequence[int]) -> tuple[GpuValue, ...]:
        whole = materialize(x)
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(ColumnSlice(whole, first, size) for first, size in zip(firsts, sizes, strict=True))

    def rope_angles(self, positions: Tensor, frequencies: Frequencies) -> Tensor:
        return rope_angles(positions, frequencies)

    def rope(self, x: GpuValue, angles: Tensor, head_dim: int) -> ColumnSlice:
        return replace(as_columns(x), angles=angles, head_dim=head_dim)

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
            overlap = self._overlap and not is_new  # it reads the plan before the kernel right before it ends
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

    def disentangled_attention(self, *values: Any) -> Tensor:
        raise Unsupported("scores that read distances (DeBERTa) have no GPU kernel", "use device cpu")

    def write_index_key(self, k: Any, batch: GpuBatch, layer: int) -> None:
        raise Unsupported("sparse attention has no GPU kernel", "use a max_model_len of index_topk, or device cpu")

    def top_positions(self, q: Any, weights: Any, batch: GpuBatch, layer: int) -> Tensor:
        raise Unsupported("sparse attention has no GPU kernel", "use a max_model_len of index_topk, or device cpu")

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
        chosen: Any = None,
    ) -> Tensor:
        assert chosen is None, "a GPU has no kernel for sparse attention"
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
        return batch.attend_latent(q, layer, scale).flatten(1)

    def activate(self, x: GpuValue, kind: Activation) -> GpuValue:
        if isinstance(x, DeferredConv):
            return x.activated(kind)
        source = materialize(x)
        rows = ActivatedRows(
            len(source),
            partial(activate_elements, source, kind),
            lambda dtype, group: quantize_rows(rows.tensor(), dtype, group, self._overlap),
            source=source,
            kind=kind,
        )
        return rows

    def activate_and_mul(self, x: GpuValue, kind: Activation) -> DeferredRows:
        rows = materialize(x)
        return DeferredRows(
            len(rows),
            partial(activate_and_mul, rows, kind, self._overlap),
            lambda dtype, group: activate_and_mul_quantized(rows, kind, dtype, group, self._overlap),
        )

    def moe(
        self,
        x: GpuValue,
        router_logits: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Tensor | None = None,
        **parts: Any,
    ) -> Tensor:
        """`parts`: where ranks divide the experts."""
        if routing.num_zero or routing.limit:
            raise Unsupported("experts that pass on their input, or clamp, have no GPU kernel", "use device cpu")
        ids, weights = route(router_logits, routing, correction)
        rows = materialize(x)
        if not routing.weigh_inputs:
            return self._experts(rows, ids, weights, gate_up, down, kind, **parts)
        # Llama 4: weights multiply the inputs of experts, so that every route is a token of its own, of weight 1.
        weighed = (rows[:, None] * weights[..., None]).to(rows.dtype).flatten(0, 1)
        routes = ids.flatten()[:, None], torch.ones_like(weights).flatten()[:, None]
        return self._experts(weighed, *routes, gate_up, down, kind, **parts).unflatten(0, ids.shape).sum(1)

    def _experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: PackedExperts, down: PackedExperts, kind: Activation
    ) -> Tensor:
        biases = gate_up.biases, down.biases
        gated = gate_up.num_outputs != down.num_inputs
        return moe_mlp(x, ids, weights, gate_up.packed, down.packed, kind, *biases, gated)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def scale(self, x: GpuValue, factor: float) -> Tensor:
        return materialize(x) * factor

    def scale_by_position(
        self, x: GpuValue, positions: Tensor, growth: float, length: int, offset: int = 0
    ) -> ColumnSlice:
        columns, factors = as_columns(x), 1 + growth * torch.log1p(torch.floor((positions + offset) / length))[:, None]
        if columns.norm is not None or columns.angles is not None:
            return as_columns((columns.tensor() * factors).to(columns.whole.dtype))
        columns.tensor().mul_(factors)
        return columns

    def clamp(self, x: GpuValue, limit: float) -> Tensor:
        return materialize(x).clamp(-limit, limit)

    def add(self, x: GpuValue, y: GpuValue) -> DeferredSum:
        return DeferredSum(x if isinstance(x, DeferredSum) else materialize(x), materialize(y))

    def concat(self, parts: Sequence[GpuValue]) -> Tensor:
        return torch.cat([materialize(part) for part in parts], dim=1)

    def tap(self, x: GpuValue, index: int) -> None: ...

    def keep(self, x: GpuValue, batch: GpuBatch) -> None:
        assert batch.kept is None, "hidden states are kept once"
        batch.kept = materialize(x)

    def hidden_states(self, batch: GpuBatch) -> Tensor:
        assert batch.hidden is not None, "the step has no hidden states"
        return batch.hidden

    def logits(
        self,
        x: GpuValue,
        head: PackedWeight,
        batch: GpuBatch,
        softcap: float = 0.0,
        vocabulary: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        rows = materialize(x)
        logits = self.linear(rows if batch.all_logits else rows[batch.logit_rows], head)
        return in_vocabulary(soft_cap_(logits, softcap) if softcap else logits, vocabulary)

    def rows(self, x: GpuValue, batch: GpuBatch) -> Tensor:
        self._write_pending(batch)
        rows = materialize(x)
        return rows if batch.all_logits else rows[batch.logit_rows]


def _rows(num_rows: int, plain: Callable[[], Tensor], overlap: bool) -> DeferredRows:
    """Rows that no kernel quantizes on the way: they are quantized afterwards."""
    rows = DeferredRows(num_rows, plain, lambda dtype, group: quantize_rows(rows.tensor(), dtype, group, overlap))
    return rows


def _layer_norm_of_groups(
    x: GpuValue,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: int,
) -> Tensor:
    """In plain torch: few models have layer norms of heads."""
    parts = materialize(x).unflatten(1, (groups, -1))
    normed = F.layer_norm(parts.float(), parts.shape[-1:], eps=eps)
    normed = normed if weight is None else normed * weight.view(-1, parts.shape[-1])
    normed = normed if bias is None else normed + bias.view(-1, parts.shape[-1])
    return normed.flatten(1).to(parts.dtype)


def in_vocabulary(logits: Tensor, vocabulary: tuple[Tensor, int] | None) -> Tensor:
    """Logits of some tokens, among those of all: the others have no chance. None: they are of all tokens."""
    if vocabulary is None:
        return logits
    tokens, size = vocabulary
    return logits.new_full((len(logits), size), -torch.inf).index_copy_(1, tokens, logits)


def num_outputs(segment: Segment) -> int:
    if isinstance(segment, ScaledWeight):
        return len(segment.q)
    return segment.num_outputs if isinstance(segment, GroupedWeight | ActOrderWeight | W4A8Weight) else len(segment)

"""The op set on an NVIDIA GPU: Triton kernels, and cuBLAS where many rows are multiplied.

Activations are 16-bit floats (or fp32, for comparisons). Ops return values that wait (`gpu_values`), so that
neighbours become one kernel; nothing here synchronizes, so a forward pass can be captured in a CUDA graph."""

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
from quire.ops.gpu.batch import GpuBatch, Ids
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.deferred import Columns, HeadNorm, HeadProducts, Rows, Sum, columns_of, num_rows_of, tensor_of
from quire.ops.gpu.embedding import embedding
from quire.ops.gpu.linear.dequantize import dequantize_rows
from quire.ops.gpu.linear.grouped import grouped_linear, takes_codes
from quire.ops.gpu.linear.grouped_gemv import x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.lora import GpuLoraSlots, add_low_rank
from quire.ops.gpu.linear.quantize_rows import Quantized, Target, quantize_rows
from quire.ops.gpu.linear.quantized_weights import Reordered, can_keep, load_codes
from quire.ops.gpu.linear.scaled import ScaledWeight, scaled_linear
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.moe.moe import mixture
from quire.ops.gpu.moe.routing import route
from quire.ops.gpu.norm import (
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_quantized,
    layer_norm,
    rms_norm,
    rms_norm_quantized,
)
from quire.ops.gpu.pointwise import activated, soft_capped
from quire.ops.gpu.program import GpuProgram, written_nowhere
from quire.ops.gpu.sampling.sampler import DeviceSampler
from quire.ops.gpu.weights import QUANTIZERS, Segment, load_experts, load_floats, load_segments
from quire.ops.opset import Activation, Float32, Keep, KVCache, KVSpec, Routing, Sampler, quantization_of
from quire.ops.reference.rope import (  # torch formulas: nothing to gain by a kernel
    Frequencies,
    rope_angles,
    rotate_heads,
)
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor

GRAPH_BYTES = 3 * 2**29  # for graphs and the sampler's tables: not measured, as they come after the pages
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class GpuOps:
    def __init__(
        self,
        device: str = "cuda",
        dtype: str = "bfloat16",
        quantization: str | None = None,
        batch_invariant: bool = False,
        graphs: bool = True,
        overlap: bool = True,
        utilization: float = 0.9,  # of the device's memory, all together
        threads: int | None = None,  # of the host: all of it happens on the device
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
        self._products = {"batch_invariant": batch_invariant, "overlap": overlap, "tickets": new_tickets(device)}
        self._overlap = overlap
        self._ones: dict[int, Tensor] = {}  # by size: of norms without a weight
        self._utilization = utilization

    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        segments = load_segments(parts, self.dtype, self.device, quantization_of(self.quantization, keep))
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
        codes = load_codes([tensor], self.device) if can_keep(tensor, self.dtype) else None
        return codes if isinstance(codes, GroupedWeight) else load_floats(tensor, self.dtype, self.device)

    def biases(self, table: Float32) -> Tensor:
        return torch.tensor(table, dtype=torch.float32, device=self.device).contiguous()

    def frequencies(self, inv_freq: Float32, scale: float) -> Frequencies:
        return Frequencies(torch.tensor(inv_freq, device=self.device), scale)

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> GpuCache:
        if spec.latent & (spec.latent - 1):
            raise Unsupported(f"latent vectors of {spec.latent} columns", "a GPU takes powers of two; use device cpu")
        return GpuCache(spec, num_blocks, num_host_blocks, str(self.device))

    def new_sampler(self, num_rows: int, vocab_size: int) -> DeviceSampler:
        return DeviceSampler(num_rows, vocab_size, self.device)

    def compile(
        self,
        forward: Callable[[Any, Any], Any],
        cache: KVCache,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        sampler: Sampler | None = None,
        sources: bool = False,
    ) -> GpuProgram:
        assert isinstance(cache, GpuCache) and (sampler is None or isinstance(sampler, DeviceSampler))
        if sampler is not None and self.graphs and self.device.type == "cuda":
            sampler.try_out(self.dtype)
        return GpuProgram(
            partial(forward, self),
            cache,
            max_tokens,
            max_rows,
            max_model_len,
            last=None if sampler is None else sampler.last,
            graphs=self.graphs and not sources,
            batch_invariant=self.batch_invariant,
        )

    def room(self, forward: Callable[[Any, Any], Any], spec: KVSpec, max_tokens: int, sources: bool = False) -> int:
        """Bytes for pages: this process's share of the device, less what it holds and the most that a step takes."""
        program = GpuProgram(partial(forward, self), self.new_cache(spec, 1), max_tokens, 1, max_tokens)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        program.run(written_nowhere([max_tokens], spec.block_size, sources))
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated() - held
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return max(int(free - (1 - self._utilization) * total) - peak - GRAPH_BYTES, 0)

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: Ids | Tensor, table: Tensor | GroupedWeight) -> Tensor:
        given, last = (ids.given, ids.last) if isinstance(ids, Ids) else (ids, None)
        if isinstance(table, GroupedWeight):
            return dequantize_rows(given, table, self.dtype, last)
        return embedding(given, table, last=last)

    def rms_norm(self, x: Tensor | Sum | Rows | Columns, weight: Tensor, eps: float) -> Rows | Columns:
        if isinstance(x, Columns) and x.angles is not None:  # heads that have turned: no kernel does that in this order
            heads = rotate_heads(x.stored().unflatten(-1, (-1, len(weight))), x.angles).float()
            normed = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
            return columns_of(normed.to(x.whole.dtype).flatten(1))
        if isinstance(x, Columns) and len(weight) < x.size:
            assert x.norm is None
            return replace(x, norm=HeadNorm(weight, eps))
        x = x if isinstance(x, Sum) else tensor_of(x)
        if isinstance(x, Tensor) or x.total is not None:
            row = tensor_of(x)
            return Rows(
                len(row),
                partial(rms_norm, row, weight, eps, self._overlap),
                lambda dtype, group: rms_norm_quantized(row, weight, eps, dtype, group, self._overlap),
            )
        add_norm, quantized = partial(self._add_norm, x, weight, eps), partial(self._add_norm_quantized, x, weight, eps)
        return Rows(len(x.y), add_norm, quantized)

    def _add_norm(self, x: Sum, weight: Tensor, eps: float) -> Tensor:
        if x.total is not None:
            return rms_norm(x.total, weight, eps, self._overlap)
        normed, x.total = add_rms_norm(x.y, tensor_of(x.x), weight, eps, self._overlap)
        return normed

    def _add_norm_quantized(self, x: Sum, weight: Tensor, eps: float, dtype: torch.dtype, group: int) -> Quantized:
        if x.total is not None:
            return rms_norm_quantized(x.total, weight, eps, dtype, group, self._overlap)
        codes, x.total = add_rms_norm_quantized(x.y, tensor_of(x.x), weight, eps, dtype, group, self._overlap)
        return codes

    def layer_norm(
        self, x: Tensor | Sum | Rows | Columns, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1
    ) -> Rows:
        plain = partial(self._layer_norm, x, weight, bias, eps) if groups == 1 else None
        norm = plain or partial(_layer_norm_of_groups, x, weight, bias, eps, groups)
        return _rows(num_rows_of(x), norm, self._overlap)

    def _layer_norm(
        self, x: Tensor | Sum | Rows | Columns, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        if weight is None:
            weight = self._ones_of(tensor_of(x.x if isinstance(x, Sum) else x).shape[1])
        if isinstance(x, Sum) and x.total is None:
            normed, x.total = add_layer_norm(x.y, tensor_of(x.x), weight, bias, eps, self._overlap)
            return normed
        return layer_norm(tensor_of(x), weight, bias, eps, self._overlap)

    def _ones_of(self, size: int) -> Tensor:
        if size not in self._ones:
            self._ones[size] = torch.ones(size, device=self.device)
        return self._ones[size]

    def linear(self, x: Tensor | Rows | Sum | Columns, w: PackedWeight) -> Tensor:
        x = x if isinstance(x, Rows) else tensor_of(x)
        products, first = [], 0
        for segment in w.packed:
            size = _num_outputs(segment)
            bias = None if w.bias is None else w.bias[first : first + size]
            products.append(self._multiply(x, segment, bias))
            first += size
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def _multiply(self, x: Tensor | Rows, w: Segment, bias: Tensor | None) -> Tensor:
        if isinstance(w, Reordered):
            return self._multiply(tensor_of(x).index_select(1, w.order), w.weight, bias)
        if isinstance(w, ScaledWeight):
            codes = self._codes(x, w.codes.dtype, 128 if w.by_blocks else 0)
            return scaled_linear(codes, w, bias, self.dtype, **self._products)
        if isinstance(w, GroupedWeight):
            num_rows = x.num_rows if isinstance(x, Rows) else len(x)
            by_codes = takes_codes(num_rows, w, self.batch_invariant)
            rows = self._codes(x, torch.int16, x_group(w)) if by_codes else tensor_of(x)
            return grouped_linear(rows, w, bias, self.dtype, **self._products)
        return linear(tensor_of(x), w, bias, **self._products)

    def _codes(self, x: Tensor | Rows, dtype: torch.dtype, group: int) -> Quantized:
        return x.codes(dtype, group) if isinstance(x, Rows) else quantize_rows(x, dtype, group, self._overlap)

    def adapt(self, y: Tensor, x: Tensor | Rows | Sum | Columns, slots: GpuLoraSlots, batch: GpuBatch) -> Tensor:
        batch.adapts = True
        if (routing := batch.rows_by_slot(slots.num_slots)) is None:
            return y
        return add_low_rank(y, tensor_of(x), slots, routing)

    def linear_heads(self, x: Tensor | Columns, w: PackedHeads) -> HeadProducts:
        return HeadProducts(tensor_of(x), w.packed, self.batch_invariant)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Columns, ...]:
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(Columns(x, first, size) for first, size in zip(firsts, sizes, strict=True))

    def rope_angles(self, positions: Tensor, frequencies: Frequencies) -> Tensor:
        return rope_angles(positions, frequencies)

    def rope(self, x: Tensor | Rows | Columns, angles: Tensor, head_dim: int) -> Columns:
        return replace(columns_of(x), angles=angles)

    def write_kv(self, k: Tensor | Rows | Columns, v: Tensor | Rows | Columns, batch: GpuBatch, layer: int) -> None:
        """In one kernel with what is to be done to q, so when that is known; or when it is clear that none comes."""
        self._write(batch)
        batch.unwritten = layer, columns_of(k), columns_of(v)

    def _write(self, batch: GpuBatch) -> None:
        """K and V that no query of this step attends to: an encoder leaves them for others."""
        if batch.unwritten is not None:
            layer, k, v = batch.unwritten
            batch.unwritten = None
            assert k.angles is None and k.norm is None
            kv_write(k.stored(), k.stored(), v.tensor(), None, batch.slots, batch.pages(layer), overlap=self._overlap)

    def paged_attention(
        self,
        q: Tensor | Rows | Columns,
        batch: GpuBatch,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor | Rows:
        scoring = Scoring(scale, window, softcap, slopes, sinks, biases)
        assert batch.unwritten is not None and batch.unwritten[0] == layer, "a layer's K and V are written before"
        (_, k, v), queries = batch.unwritten, columns_of(q)
        batch.unwritten = None
        assert k.angles is queries.angles, "q and k turn alike"
        heads = queries.stored(), k.stored(), v.tensor(), queries.angles, batch.slots, batch.pages(layer)
        norms: dict[str, Any] = {}
        for name, columns in (("q_norm", queries), ("k_norm", k)):
            if columns.norm is not None:  # a single head was normed as a row
                norms |= {name: columns.norm.weight, "eps": columns.norm.eps}
        if batch.only_decodes and not batch.batch_invariant and biases is None:
            plan, is_new = batch.decode_plan(window, queries.size // head_dim)
            overlap = self._overlap and not is_new  # what it reads early was written long before
            step = partial(decode_step, *heads, batch.runs, plan, scoring, **norms, overlap=overlap)
            return self._heads_as_wanted(step, queries, head_dim) if batch.adapters is None else step().flatten(1)
        turned = kv_write(*heads, **norms, overlap=self._overlap)
        return batch.attend(turned, layer, scoring, self._overlap).flatten(1)

    def _heads_as_wanted(self, step: Callable[..., Tensor], q: Columns, head_dim: int) -> Rows:
        """Rows, or codes where the step can give such. (Adapters would want both, and the step would be done twice.)"""
        num_tokens = len(q.whole)

        def codes(dtype: torch.dtype, group: int) -> Quantized:
            if not can_write_quantized(num_tokens, q.size // head_dim, head_dim, dtype, group):
                return quantize_rows(rows.tensor(), dtype, group, self._overlap)
            target = Target.quantized(q.whole, q.size, dtype, group)
            step(target=target)
            return target.result

        rows = Rows(num_tokens, lambda: step().flatten(1), codes)
        return rows

    def cross_attention(
        self, q: Tensor | Rows | Columns, batch: GpuBatch, layer: int, head_dim: int, scale: float
    ) -> Tensor:
        assert batch.sources is not None, "the sequences of this step have no sources"
        return batch.sources.attend(self._heads(q, head_dim), layer, Scoring(scale)).flatten(1)

    def attention(
        self,
        q: Tensor | Rows | Columns,
        k: Tensor | Rows | Columns,
        v: Tensor | Rows | Columns,
        batch: GpuBatch,
        head_dim: int,
        scale: float,
        causal: bool = False,
        window: int = 0,
        biases: Tensor | None = None,
    ) -> Tensor:
        queries, keys, values = (self._heads(x, head_dim) for x in (q, k, v))
        return self_attention(queries, keys, values, batch.runs, scale, causal, window, biases).flatten(1)

    def _heads(self, x: Tensor | Rows | Columns, head_dim: int) -> Tensor:
        """[T, heads, head_dim], with all done to it."""
        columns = columns_of(x)
        heads = columns.stored().unflatten(1, (-1, head_dim))
        if columns.norm is not None:
            heads = F.rms_norm(heads.float(), (head_dim,), columns.norm.weight, columns.norm.eps).to(heads.dtype)
        return heads if columns.angles is None else rotate_heads(heads, columns.angles)

    def write_latent(self, latent: Tensor | Rows, turned: Columns, batch: GpuBatch, layer: int) -> None:
        """In one kernel with what is to be done to q, so when that is known."""
        assert batch.unwritten is None, "a latent is attended to before others are written"
        batch.unwritten = layer, columns_of(latent), columns_of(turned)

    def mla_attention(
        self, q_latent: Tensor | HeadProducts, q_turned: Columns, batch: GpuBatch, layer: int, scale: float
    ) -> Tensor:
        assert batch.unwritten is not None and batch.unwritten[0] == layer, "a layer's latents are written before"
        _, latent, turned = batch.unwritten
        batch.unwritten = None
        spec, angles = batch.cache.spec, q_turned.angles
        assert angles is not None and turned.angles is angles, "q and k are turned alike"
        num_heads = q_turned.size // (spec.head_dim - spec.latent)
        q = q_turned.whole.new_empty(len(batch.slots), num_heads, spec.head_dim)
        if isinstance(q_latent, HeadProducts):
            q_latent.write(q[..., : spec.latent])
        else:
            q[..., : spec.latent] = q_latent.unflatten(1, (num_heads, -1))
        page = batch.latent_page(layer)
        latent_write(
            latent.tensor(),
            turned.stored(),
            q_turned.stored(),
            angles,
            batch.slots,
            page,
            q,
            overlap=self._overlap,
        )
        return batch.attend_latent(q, layer, scale).flatten(1)

    def activate(self, x: Tensor, kind: Activation) -> Rows:
        return _rows(len(x), partial(activated, x, kind), self._overlap)

    def activate_and_mul(self, x: Tensor, kind: Activation) -> Rows:
        return Rows(
            len(x),
            partial(activate_and_mul, x, kind, self._overlap),
            lambda dtype, group: activate_and_mul_quantized(x, kind, dtype, group, self._overlap),
        )

    def moe(
        self,
        x: Tensor | Rows | Sum,
        router_logits: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Tensor | None = None,
    ) -> Tensor:
        ids, weights = route(router_logits, routing, correction)
        biases = gate_up.biases, down.biases
        return mixture(tensor_of(x), ids, weights, gate_up.packed, down.packed, kind, *biases)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def scale(self, x: Tensor | Rows | Sum | Columns, factor: float) -> Tensor:
        return tensor_of(x) * factor

    def scale_by_position(self, x: Tensor | Rows | Columns, positions: Tensor, growth: float, length: int) -> Columns:
        columns = columns_of(x)
        columns.tensor().mul_((1 + growth * torch.log1p(torch.floor(positions / length)))[:, None])
        return columns

    def clamp(self, x: Tensor | Rows | Sum | Columns, most: float) -> Tensor:
        return tensor_of(x).clamp(-most, most)

    def add(self, x: Tensor | Sum | Rows | Columns, y: Tensor | Sum | Rows | Columns) -> Sum:
        return Sum(x if isinstance(x, Sum) else tensor_of(x), tensor_of(y))

    def logits(self, x: Tensor | Rows | Sum, head: PackedWeight, batch: GpuBatch, softcap: float = 0.0) -> Tensor:
        rows = tensor_of(x)
        logits = self.linear(rows if batch.all_logits else rows[batch.logit_rows], head)
        return soft_capped(logits, softcap) if softcap else logits

    def rows(self, x: Tensor | Rows | Sum, batch: GpuBatch) -> Tensor:
        self._write(batch)
        rows = tensor_of(x)
        return rows if batch.all_logits else rows[batch.logit_rows]


def _rows(num_rows: int, plain: Callable[[], Tensor], overlap: bool) -> Rows:
    """Where no kernel gives codes at once: they are made of the rows."""
    rows = Rows(num_rows, plain, lambda dtype, group: quantize_rows(rows.tensor(), dtype, group, overlap))
    return rows


def _layer_norm_of_groups(
    x: Tensor | Sum | Rows | Columns, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int
) -> Tensor:
    """In plain torch: few models norm every head by its mean."""
    parts = tensor_of(x).unflatten(1, (groups, -1))
    normed = F.layer_norm(parts.float(), parts.shape[-1:], eps=eps)
    normed = normed if weight is None else normed * weight.view(-1, parts.shape[-1])
    normed = normed if bias is None else normed + bias.view(-1, parts.shape[-1])
    return normed.flatten(1).to(parts.dtype)


def _num_outputs(segment: Segment) -> int:
    if isinstance(segment, ScaledWeight):
        return len(segment.codes)
    return segment.num_outputs if isinstance(segment, GroupedWeight | Reordered) else len(segment)

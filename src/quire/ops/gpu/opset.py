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
from quire.ops.gpu.attention.indexer import SCORE_BYTES
from quire.ops.gpu.attention.opset import AttentionOps
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
    NormedRows,
    as_columns,
    materialize,
    num_rows_of,
)
from quire.ops.gpu.device import room_of_share
from quire.ops.gpu.device_timer import new_timer
from quire.ops.gpu.embedding import embedding
from quire.ops.gpu.head_norm import norm_heads
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.linear.dequantize import dequantize_rows
from quire.ops.gpu.linear.grouped import grouped_linear, quantized_input
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.lora import GpuLoraSlots, add_lora
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
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
from quire.ops.gpu.sampling.graphs import CAPTURED_AT
from quire.ops.gpu.sampling.sampler import DeviceSampler
from quire.ops.gpu.states.opset import StateOps
from quire.ops.gpu.weights import QUANTIZERS, Segment, load_experts, load_floats, load_segments, quantization_for
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Activation, Float32, Int32, Keep, ProgramSpec, Routing
from quire.ops.reference.rope import Frequencies, rotate_heads
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.ops.timer import Timer

GRAPH_BYTES = 3 * 2**29  # reserved for graphs and the sampler's tables, which are allocated after the pages
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class GpuOps(AttentionOps, StateOps):
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
        self._free_at_start = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0

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

    def new_timer(self) -> Timer:
        return new_timer(self.device, num_untimed=CAPTURED_AT)

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
        """Bytes left for pages: this engine's share of the device, less what it holds and the peak of a step."""
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
        scores = SCORE_BYTES if spec.index else 0  # of contexts that are longer than those of the step
        room = room_of_share(self._utilization, total, free, self._free_at_start)
        return max(room - peak - scores - GRAPH_BYTES, 0)

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
            return NormedRows(
                len(rows),
                partial(rms_norm, rows, weight, eps, self._overlap),
                lambda dtype, group: rms_norm_quantized(rows, weight, eps, dtype, group, self._overlap),
                x=rows,
                weight=weight,
                eps=eps,
            )
        add_norm, quantized = partial(self._add_norm, x, weight, eps), partial(self._add_norm_quantized, x, weight, eps)
        return NormedRows(len(x.y), add_norm, quantized, x=x, weight=weight, eps=eps)

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
        """The outputs of the whole matrix of each segment, where the segment has some of its rows; None: it has all."""
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
            wanted = quantized_input(num_rows_of(x), w, self.batch_invariant)
            input = materialize(x) if wanted is None else self._quantize(x, *wanted)
            return grouped_linear(input, w, bias, self.dtype, **options)
        fused = None
        if isinstance(x, NormedRows) and not self.batch_invariant:
            fused = x.linear(w, bias, all_outputs or len(w), self._overlap)
        return linear(materialize(x), w, bias, **options) if fused is None else fused

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

    def rope_angles(self, positions: Tensor, frequencies: Frequencies, group: int = 1) -> Tensor:
        return rope_angles(positions if group == 1 else positions // group * group, frequencies)

    def rope(self, x: GpuValue, angles: Tensor, head_dim: int) -> ColumnSlice:
        return replace(as_columns(x), angles=angles, head_dim=head_dim)

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
        ids, weights = route(router_logits, routing, correction, self._overlap)
        rows = materialize(x)
        if not routing.weigh_inputs:
            added = self._experts(rows, ids, weights, gate_up, down, kind, limit=routing.limit, **parts)
            return added if not routing.num_zero else add_passed(added, rows, ids, weights, router_logits, routing)
        assert not routing.num_zero and not routing.limit
        # Llama 4: weights multiply the inputs of experts, so that every route is a token of its own, of weight 1.
        weighed = (rows[:, None] * weights[..., None]).to(rows.dtype).flatten(0, 1)
        routes = ids.flatten()[:, None], torch.ones_like(weights).flatten()[:, None]
        return self._experts(weighed, *routes, gate_up, down, kind, **parts).unflatten(0, ids.shape).sum(1)

    def _experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        kind: Activation,
        limit: float = 0.0,
    ) -> Tensor:
        biases = gate_up.biases, down.biases
        gated = gate_up.num_outputs != down.num_inputs
        given = x, ids, weights, gate_up.packed, down.packed, kind, *biases, gated
        return moe_mlp(*given, limit=limit, batch_invariant=self.batch_invariant, overlap=self._overlap)

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
    """A layer norm for each group of columns, in plain torch: few models have it."""
    parts = materialize(x).unflatten(1, (groups, -1))
    normed = F.layer_norm(parts.float(), parts.shape[-1:], eps=eps)
    normed = normed if weight is None else normed * weight.view(-1, parts.shape[-1])
    normed = normed if bias is None else normed + bias.view(-1, parts.shape[-1])
    return normed.flatten(1).to(parts.dtype)


def add_passed(
    added: Tensor, x: Tensor, ids: Tensor, weights: Tensor, router_logits: Tensor, routing: Routing
) -> Tensor:
    """With what the experts that pass on their input add (LongCat): they are the last."""
    passed = ids >= router_logits.shape[1] - routing.num_zero
    return (added + x * (weights * passed).sum(1, keepdim=True)).to(added.dtype)


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

"""NativeOps: packs weights, makes KV caches, and compiles forward passes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.core.errors import Unsupported
from quire.ops.compiled import native
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.native.cache import NativeCache
from quire.ops.native.cpus import compute_threads
from quire.ops.native.heap import LARGE_ARRAY_BYTES, USUAL_ARRAY_BYTES, free_at_once
from quire.ops.native.hidden_states import DraftVocabulary, NativeHiddenStates
from quire.ops.native.lora import NativeLoraSlots
from quire.ops.native.program import NativeProgram
from quire.ops.native.recorder import RecordedFrequencies, RecordedTable
from quire.ops.opset import Float32, Int32, Keep, ProgramSpec, Sampler, quantization_of
from quire.ops.tensors import (
    BF16,
    F8_E4M3,
    F8_E5M2,
    F16,
    F32,
    FP8,
    NF4,
    Q4_1,
    Q8_0,
    PackedExperts,
    PackedHeads,
    PackedWeight,
    StorageType,
    StoredTensor,
)
from quire.ops.timer import ClockTimer, Timer

if TYPE_CHECKING:
    from quire.ops.ranks.group import RankGroup

# By option value. Groups of 32; 8.5, 5 and 5 bits per weight.
QUANTIZED = {"int8": Q8_0, "int4": Q4_1, "nf4": NF4}
FLOATS = (F32, F16, BF16, F8_E4M3, F8_E5M2, FP8)


# Storage types that no layout holds exactly, or in as few bits, and the warning about each.
WARNINGS = {
    "NF4": "NF4's table is kept in 112ths: a weight is off by up to 0.4 % of its block's largest",
    "FP4": "FP4's smallest number is kept as 1/120 instead of 1/192 of a block's largest",
    "FP8": "fp8 weights are kept as bfloat16, which takes twice the memory; `--quantization int8` takes half of that",
    "F8_E4M3": "fp8 weights are kept as bfloat16, which takes twice the memory",
    "F8_E5M2": "fp8 weights are kept as bfloat16, which takes twice the memory",
}
log = logging.getLogger("quire.weights")


class NativeOps:
    """The op set of the CPU. `compile` runs a forward pass with a `Recorder`, which has its ops."""

    def __init__(
        self,
        threads: int | None = None,
        quantization: str | None = None,
        fp16: bool = False,
        group: "RankGroup | None" = None,
    ) -> None:
        """`threads`: of a step; by default, `compute_threads()`.
        `quantization`: the type that float matrices are quantized to when they are packed, one of QUANTIZED.
        `fp16`: fp32 matrices become fp16, which is faster on CPUs with fp16 arithmetic.
        `group`: the ranks that compute together with this process."""
        if quantization is not None and quantization not in QUANTIZED:
            raise Unsupported(
                f"quantization `{quantization}` is not supported on a CPU", f"use one of {', '.join(QUANTIZED)}"
            )
        self.threads = threads if threads is not None else compute_threads()
        self.quantization = quantization
        self.fp16 = fp16
        self.group = group
        self._warned: set[str] = set()
        free_at_once(LARGE_ARRAY_BYTES)

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        if (quantization := quantization_of(self.quantization, keep)) is not None:
            parts = [_quantized(part, QUANTIZED[quantization]) for part in parts]
        elif self.fp16 and keep is Keep.NOTHING:
            parts = [_to_fp16(part) for part in parts]
        self._warn(parts)
        segments = [_pack(list(alike)) for _, alike in groupby(parts, key=_kind)]
        vector = np.concatenate([self.vector(part) for part in bias]) if bias else None
        return PackedWeight(
            num_outputs=sum(part.num_rows for part in parts),
            num_inputs=parts[0].num_columns,
            nbytes=sum(segment.nbytes for segment in segments) + (vector.nbytes if vector is not None else 0),
            packed=segments,
            bias=vector,
        )

    def _warn(self, parts: Sequence[StoredTensor]) -> None:
        """Log each warning about a storage type once."""
        for warning in (WARNINGS[part.type.name] for part in parts if part.type.name in WARNINGS):
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        for part, *others in experts:
            for other in others:
                if _order(other) != _order(part):
                    raise Unsupported(f"{part.name} and {other.name} have their inputs in different orders (act-order)")
                if other.threshold != part.threshold and not {part.type, other.type} & {*FLOATS}:
                    raise Unsupported(f"{part.name} and {other.name} have different thresholds for their inputs")
        packed = [self.pack(parts) for parts in experts]
        first = packed[0]
        assert all((w.num_outputs, w.num_inputs) == (first.num_outputs, first.num_inputs) for w in packed)
        matrices = [w.packed for w in packed]
        added = None if biases is None else np.concatenate([self.vector(part) for parts in biases for part in parts])
        nbytes = sum(w.nbytes for w in packed) + (0 if added is None else added.nbytes)
        return PackedExperts(len(packed), first.num_outputs, first.num_inputs, nbytes, matrices, added)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        matrices = [_pack([head]) for head in heads]
        num_outputs, num_inputs = heads[0].shape
        assert all(head.shape == heads[0].shape and head.type.block == 1 for head in heads)
        return PackedHeads(len(heads), num_outputs, num_inputs, sum(matrix.nbytes for matrix in matrices), matrices)

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> NativeLoraSlots:
        return NativeLoraSlots(num_inputs, sizes, num_slots, max_rank)

    def vector(self, tensor: StoredTensor) -> Float32:
        values: Float32 = native.dequantize(tensor.type.name, np.ascontiguousarray(tensor.data), tensor.num_columns)
        return values.reshape(-1)

    def table(self, tensor: StoredTensor) -> RecordedTable:
        order = None if tensor.row_order is None else np.ascontiguousarray(tensor.row_order, dtype=np.int32)
        assert order is None or (len(order) == tensor.num_rows and order.min() >= 0 and order.max() < tensor.num_rows)
        return RecordedTable(tensor.type.name, np.ascontiguousarray(tensor.data), order, tensor.num_columns)

    def conv_weight(self, tensor: StoredTensor) -> Float32:
        return np.ascontiguousarray(self.vector(tensor).reshape(tensor.shape[0], -1).T)

    def biases(self, table: Float32) -> Float32:
        return np.ascontiguousarray(table, dtype=np.float32)

    def frequencies(self, inv_freq: Float32, scale: float) -> RecordedFrequencies:
        return RecordedFrequencies(np.ascontiguousarray(inv_freq, dtype=np.float32), scale)

    def draft_vocabulary(self, tokens: Int32, vocab: int) -> DraftVocabulary:
        return DraftVocabulary(tokens.astype(np.intp), vocab)

    def new_hidden_states(self, num_rows: int, num_columns: int) -> NativeHiddenStates:
        return NativeHiddenStates(np.zeros((num_rows, num_columns), np.float32))

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> NativeCache:
        return NativeCache(spec, num_blocks, num_host_blocks)

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler:
        from quire.ops.native.sampler import NativeSampler

        return NativeSampler(num_rows, vocab_size, self.threads)

    def new_timer(self) -> Timer:
        return ClockTimer()

    def compile(self, forward: Callable[[Any, Any], Any], cache: KVCache, spec: ProgramSpec) -> NativeProgram:
        assert isinstance(cache, NativeCache), "the cache was made by another op set"
        assert spec.hidden is None or isinstance(spec.hidden, NativeHiddenStates)
        free_at_once(USUAL_ARRAY_BYTES)
        return NativeProgram(forward, cache, spec.max_tokens, self.threads, spec.hidden, self.group)


def _to_fp16(part: StoredTensor) -> StoredTensor:
    """The tensor in fp16, if it is fp32 and no value overflows."""
    if part.type is not F32:
        return part
    floats = np.ascontiguousarray(part.data).view(np.float32)
    if np.abs(floats).max(initial=0) > np.finfo(np.float16).max:
        return part
    return replace(part, type=F16, data=floats.astype(np.float16).view(np.uint8))


def _quantized(part: StoredTensor, kind: StorageType) -> StoredTensor:
    if part.type not in FLOATS:
        raise Unsupported(f"{part.name} is quantized already, as {part.type.name}", "leave out `quantization`")
    if part.num_columns % kind.block:
        return part  # rows that are not whole blocks stay floats
    data = native.quantize(part.type.name, np.ascontiguousarray(part.data), part.num_columns, kind.name)
    return replace(part, type=kind, data=data)


def _kind(part: StoredTensor) -> tuple[str, bytes, float]:
    """Parts with equal kinds can be packed into one matrix."""
    return part.type.name, _order(part), part.threshold


def _order(part: StoredTensor) -> bytes:
    return b"" if part.column_order is None else part.column_order.tobytes()


def _pack(parts: list[StoredTensor]) -> Any:
    """Pack parts of one kind into one matrix, so that threads share its outputs evenly."""
    order = None
    if any(part.row_order is not None for part in parts):
        firsts = np.cumsum([0, *(part.num_rows for part in parts)])
        orders = [np.arange(p.num_rows) if p.row_order is None else p.row_order for p in parts]
        order = np.concatenate([order + first for order, first in zip(orders, firsts, strict=False)]).astype(np.int32)
    rows = [np.ascontiguousarray(part.data) for part in parts]
    first = parts[0]
    return native.Matrix(first.type.name, rows, first.num_columns, order, first.column_order, first.threshold)

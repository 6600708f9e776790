"""NativeOps: packs weights, holds pages, and turns a forward pass into a program."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from quire.ops.native.cache import NativeCache
from quire.ops.native.cpus import available_cpus
from quire.ops.native.library import native
from quire.ops.native.program import NativeProgram
from quire.ops.native.recorder import Frequencies, Table
from quire.ops.opset import Float32, KVCache, KVSpec, Sampler
from quire.ops.tensors import F16, F32, PackedExperts, PackedHeads, PackedWeight, StoredTensor


class NativeOps:
    """The op set on a CPU. The ops of a forward pass are those of the `Recorder` that `compile` hands to it."""

    def __init__(self, threads: int | None = None, halves: bool = False) -> None:
        """`threads`: how many work on a step; by default, as many as there are CPUs for this process. `halves`:
        matrices of fp32 become fp16 when they are loaded. Products are faster where the CPU multiplies halves."""
        self.threads = threads if threads is not None else available_cpus()
        self.halves = halves

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: bool = False
    ) -> PackedWeight:
        if self.halves and not keep:
            parts = [_halved(part) for part in parts]
        segments = [_pack(list(alike)) for _, alike in groupby(parts, key=lambda part: part.type)]
        vector = np.concatenate([self.vector(part) for part in bias]) if bias else None
        return PackedWeight(
            num_outputs=sum(part.num_rows for part in parts),
            num_inputs=parts[0].num_columns,
            nbytes=sum(segment.nbytes for segment in segments) + (vector.nbytes if vector is not None else 0),
            packed=segments,
            bias=vector,
        )

    def pack_experts(self, experts: Sequence[Sequence[StoredTensor]]) -> PackedExperts:
        packed = [self.pack(parts) for parts in experts]
        first = packed[0]
        assert all((w.num_outputs, w.num_inputs) == (first.num_outputs, first.num_inputs) for w in packed)
        matrices = [w.packed for w in packed]
        return PackedExperts(len(packed), first.num_outputs, first.num_inputs, sum(w.nbytes for w in packed), matrices)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        matrices = [_pack([head]) for head in heads]
        num_outputs, num_inputs = heads[0].shape
        assert all(head.shape == heads[0].shape and head.type.block == 1 for head in heads)
        return PackedHeads(len(heads), num_outputs, num_inputs, sum(matrix.nbytes for matrix in matrices), matrices)

    def vector(self, tensor: StoredTensor) -> Float32:
        values: Float32 = native.dequantize(tensor.type.name, np.ascontiguousarray(tensor.data), tensor.num_columns)
        return values.reshape(-1)

    def table(self, tensor: StoredTensor) -> Table:
        order = None if tensor.row_order is None else np.ascontiguousarray(tensor.row_order, dtype=np.int32)
        assert order is None or (len(order) == tensor.num_rows and order.min() >= 0 and order.max() < tensor.num_rows)
        return Table(tensor.type.name, np.ascontiguousarray(tensor.data), order, tensor.num_columns)

    def frequencies(self, inv_freq: Float32, scale: float) -> Frequencies:
        return Frequencies(np.ascontiguousarray(inv_freq, dtype=np.float32), scale)

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> NativeCache:
        return NativeCache(spec, num_blocks, num_host_blocks)

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler:
        from quire.ops.native.sampler import NativeSampler

        return NativeSampler(num_rows, vocab_size, self.threads)

    def compile(
        self,
        forward: Callable[[Any, Any], Any],
        cache: KVCache,
        max_tokens: int,
        max_rows: int = 0,
        max_model_len: int = 0,
        sampler: Sampler | None = None,
    ) -> NativeProgram:
        assert isinstance(cache, NativeCache), "the cache was made by another op set"
        return NativeProgram(forward, cache, max_tokens, self.threads)


def _halved(part: StoredTensor) -> StoredTensor:
    """In fp16, if it is in fp32 and no number is too large for that."""
    if part.type is not F32:
        return part
    floats = np.ascontiguousarray(part.data).view(np.float32)
    if np.abs(floats).max(initial=0) > np.finfo(np.float16).max:
        return part
    return replace(part, type=F16, data=floats.astype(np.float16).view(np.uint8))


def _pack(parts: list[StoredTensor]) -> Any:
    """Parts stored in one type become one matrix, so that its outputs are shared evenly among the threads."""
    data, row_order = parts[0].data, parts[0].row_order
    if len(parts) > 1:
        data = np.concatenate([part.data for part in parts])
        firsts = np.cumsum([0, *(part.num_rows for part in parts)])
        if any(part.row_order is not None for part in parts):
            orders = [np.arange(p.num_rows) if p.row_order is None else p.row_order for p in parts]
            row_order = np.concatenate([order + first for order, first in zip(orders, firsts, strict=False)])
    order = None if row_order is None else np.ascontiguousarray(row_order, dtype=np.int32)
    return native.Matrix(parts[0].type.name, np.ascontiguousarray(data), parts[0].num_columns, order)

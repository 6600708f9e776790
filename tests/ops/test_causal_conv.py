"""Causal convolution: against plain numpy, and its states in blocks, on the plain op set and the native one."""

from typing import Any

import numpy as np
import pytest

from quire.ops.kv_spec import ConvSpec, KVSpec
from quire.ops.opset import OpSet, ProgramSpec, StepBatch
from quire.ops.tensors import stored_floats

BLOCK, NUM_BLOCKS, MAX_TOKENS = 4, 24, 64
CHANNELS = (5, 48, 130)
BACKENDS = ["torch", "native"]
Sequence = tuple[list[int], int, list[int]]  # ids, how many of them are computed, block table


def make_ops(backend: str, threads: int = 2) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps(threads)
    from quire.ops.reference import TorchOps

    return TorchOps(threads=1)


class Convolution:
    """Two convolutions, one after the other, of rows of a random table."""

    def __init__(self, backend: str, channels: int, taps: int, bias: bool, threads: int = 2) -> None:
        rng = np.random.default_rng(channels + taps)
        self.table = rng.normal(size=(50, channels)).astype(np.float32)
        self.weight = rng.normal(size=(channels, taps)).astype(np.float32)
        self.bias = rng.normal(size=channels).astype(np.float32) if bias else None
        ops = make_ops(backend, threads)
        table = ops.table(stored_floats("table", self.table))
        weight = ops.conv_weight(stored_floats("weight", self.weight))
        added = None if self.bias is None else ops.vector(stored_floats("bias", self.bias))

        def forward(ops: OpSet, batch: Any) -> Any:
            x = ops.embedding(batch.ids, table)
            x = ops.causal_conv(x, weight, added, batch, 0)
            return ops.rows(ops.causal_conv(ops.mul(x, x), weight, added, batch, 1), batch)

        spec = KVSpec(1, 1, 8, BLOCK, "float32", conv=ConvSpec(2, channels, taps))
        self.cache: Any = ops.new_cache(spec, NUM_BLOCKS, 4)
        if backend == "native":
            self.cache.pages.fill(0xFF)  # unwritten states are NaN
        else:
            self.cache.states.fill_(float("nan"))
        self.program = ops.compile(forward, self.cache, ProgramSpec(MAX_TOKENS, 8, MAX_TOKENS))

    def run(self, *sequences: Sequence) -> np.ndarray:
        """The rows of all ids that are not computed yet."""
        runs = [(np.arange(start, len(ids)), np.array(table)) for ids, start, table in sequences]
        positions = np.concatenate([where for where, _ in runs]).astype(np.int32)
        tables = np.zeros((len(runs), MAX_TOKENS // BLOCK), np.int32)
        for row, (_, table) in zip(tables, runs, strict=True):
            row[: len(table)] = table
        batch = StepBatch(
            ids=np.concatenate([ids[start:] for ids, start, _ in sequences]).astype(np.int32),
            positions=positions,
            slots=np.concatenate([table[at // BLOCK] * BLOCK + at % BLOCK for at, table in runs]).astype(np.int32),
            seq_starts=np.cumsum([0, *(len(at) for at, _ in runs)]).astype(np.int32),
            context_lens=np.array([len(ids) for ids, _, _ in sequences], np.int32),
            block_tables=tables,
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )
        rows = self.program.run(batch)
        return (rows.numpy() if hasattr(rows, "numpy") else rows).copy()

    def expected(self, ids: list[int]) -> np.ndarray:
        x = self._convolve(self.table[ids].astype(np.float64))
        return self._convolve(x * x)

    def _convolve(self, x: np.ndarray) -> np.ndarray:
        channels, taps = self.weight.shape
        padded = np.concatenate([np.zeros((taps - 1, channels)), x])
        sums = [sum(self.weight[:, tap] * padded[i + tap] for tap in range(taps)) for i in range(len(x))]
        return np.array(sums) + (0.0 if self.bias is None else self.bias)


def ids_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("channels", "taps"), [(5, 3), (48, 4), (130, 1), (33, 9), (16, 16)])
def test_sequences_of_a_step_give_the_sums_of_each(backend: str, channels: int, taps: int) -> None:
    conv = Convolution(backend, channels, taps, bias=taps % 2 == 1)
    first, second = ids_of(1, 13), ids_of(2, 1)
    rows = conv.run((first, 0, [3, 9, 1, 7]), (second, 0, [5]))
    expected = np.concatenate([conv.expected(first), conv.expected(second)])
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("taps", [2, 3, 7])
@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 4, 5], [5, 6, 7, 8, 9, 10], [15, 17]])
def test_chunks_have_the_bits_of_the_whole(backend: str, taps: int, cuts: list[int]) -> None:
    conv, ids, table = Convolution(backend, 48, taps, bias=True), ids_of(3, 19), [2, 4, 6, 8, 10]
    whole = conv.run((ids, 0, [11, 12, 13, 14, 15]))
    chunks = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        beside = (ids_of(end, 3), 0, [20])
        chunks.append(conv.run((ids[:end], start, table), beside)[: end - start])
    np.testing.assert_array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_block_can_be_continued_by_others_also_in_the_step_that_fills_it(backend: str) -> None:
    conv, prefix = Convolution(backend, 48, 4, bias=False), ids_of(4, 8)
    mine, yours = prefix + ids_of(5, 3), prefix + ids_of(6, 6)
    rows = conv.run((mine, 0, [1, 2, 3]), (yours, 8, [1, 2, 4, 5]))
    again = conv.run((yours, 0, [6, 7, 8, 9]))
    np.testing.assert_array_equal(rows[len(mine) :], again[8:])
    later = conv.run(([*yours[:5], 9], 4, [1, 10]))
    np.testing.assert_array_equal(later, conv.run(([*yours[:5], 9], 0, [11, 12]))[4:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_move_with_their_blocks(backend: str) -> None:
    conv, ids = Convolution(backend, 48, 5, bias=False), ids_of(7, 9)
    whole = conv.run((ids, 0, [1, 2, 3]))
    conv.run((ids[:6], 0, [1, 2]))
    conv.cache.copy([(1, 11), (2, 12)])
    conv.cache.swap_out([(11, 1), (12, 3)])
    conv.run((ids_of(8, 8), 0, [11, 12]))
    conv.cache.swap_in([(1, 5), (3, 6)])
    np.testing.assert_array_equal(conv.run((ids, 6, [5, 6, 7])), whole[6:])


@pytest.mark.parametrize("channels", CHANNELS)
def test_the_number_of_threads_changes_no_bit(channels: int) -> None:
    ids = ids_of(9, 11)
    one, three = (Convolution("native", channels, 3, True, threads) for threads in (1, 3))
    for start, end in ((0, 6), (6, 11)):
        step = (ids[:end], start, [3, 2, 1])
        np.testing.assert_array_equal(one.run(step), three.run(step))

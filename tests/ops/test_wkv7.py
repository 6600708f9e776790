"""The time mixing of RWKV 7, with states in slots: in segments, on the plain op set and the native one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import OpSet, ProgramSpec, StepBatch, Wkv7Weights
from quire.ops.reference import TorchOps
from quire.ops.tensors import stored_floats
from quire.quantize.eager_ops import EagerBatch, EagerOps

SHAPES = [(1, 1), (3, 20), (2, 64), (1, 70)]  # heads, columns of each
Segments = list[tuple[int, int, int]]


class TimeMixing:
    """r, w, k, v and a are columns of rows of a random table."""

    def __init__(self, ops: OpSet, shape: tuple[int, int]) -> None:
        self.ops, (self.heads, size) = ops, shape
        self.columns = self.heads * size
        rng = np.random.default_rng(size)
        self.table = rng.normal(size=(50, 5 * self.columns)).astype(np.float32)
        self.table[:, 4 * self.columns :] = rng.random((50, self.columns))  # a is a sigmoid
        self.vectors = rng.normal(0.7, 0.3, (5, self.columns)).astype(np.float32)
        states = StateSpec(1, (self.heads, size, size), num_slots=4)
        self.cache: Any = ops.new_cache(KVSpec(1, 1, 8, 4, "float32", states=states), 16)
        table = ops.table(stored_floats("table", self.table))

        def forward(ops: OpSet, batch: Any) -> Any:
            return ops.rows(self.mix(ops, ops.embedding(batch.ids, table), batch), batch)

        self.program = ops.compile(forward, self.cache, ProgramSpec(64, 4, 64))

    def mix(self, ops: Any, rows: Any, batch: Any, loader: Any = None) -> Any:
        vectors = [(loader or self.ops).vector(stored_floats("v", vector)) for vector in self.vectors]
        weights = Wkv7Weights(*vectors, heads=self.heads, eps=1e-4)
        return ops.wkv7(*ops.split(rows, (self.columns,) * 5), weights, batch, 0)

    def run(self, ids: list[int], segments: Segments) -> np.ndarray:
        n = len(ids)
        places = np.arange(n, dtype=np.int32)
        batch = StepBatch(
            ids=np.array(ids, np.int32),
            positions=places,
            slots=places,
            seq_starts=np.array([0, n], np.int32),
            context_lens=np.array([n], np.int32),
            block_tables=np.arange(16, dtype=np.int32)[None],
            logit_rows=places,
            states=np.array(segments, np.int32),
        )
        rows = self.program.run(batch)
        return (rows.numpy() if hasattr(rows, "numpy") else rows).copy()


def ids_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


def assert_close(rows: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@pytest.fixture
def best_isa_again() -> Iterator[None]:
    yield
    use_isa(available_isas()[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", available_isas())
def test_every_isa_computes_what_plain_torch_does(isa: str, shape: tuple[int, int], best_isa_again: None) -> None:
    use_isa(isa)
    ids, segments = ids_of(1, 40), [(7, -1, 2), (8, 2, 0), (33, 0, 0), (40, -1, 1)]
    native, plain = TimeMixing(NativeOps(2), shape), TimeMixing(TorchOps(threads=1), shape)
    assert_close(native.run(ids, segments), plain.run(ids, segments))


@pytest.mark.parametrize("make", [TorchOps, NativeOps])
def test_chunks_and_segments_have_the_bits_of_the_whole(make: Any) -> None:
    mixing, ids = TimeMixing(make(threads=1), SHAPES[1]), ids_of(3, 19)
    whole = mixing.run(ids, [(19, -1, 3)])
    np.testing.assert_array_equal(mixing.run(ids, [(1, -1, 0), (4, 0, 1), (16, 1, 1), (19, 1, 2)]), whole)
    for cut in (1, 5, 18):
        first = mixing.run([*ids[:cut], *ids_of(9, 3)], [(cut, -1, 1), (cut + 3, -1, 0)])[:cut]
        np.testing.assert_array_equal(np.concatenate([first, mixing.run(ids[cut:], [(19 - cut, 1, 1)])]), whole)


def test_the_number_of_threads_changes_no_bit() -> None:
    ids, (one, three) = ids_of(9, 11), (TimeMixing(NativeOps(threads), SHAPES[1]) for threads in (1, 3))
    np.testing.assert_array_equal(one.run(ids, [(11, -1, 0)]), three.run(ids, [(11, -1, 0)]))


def test_calibration_computes_the_same() -> None:
    mixing, ids, ops = TimeMixing(TorchOps(threads=1), SHAPES[1]), ids_of(7, 9), EagerOps()
    rows = mixing.mix(ops, mixing.table[[*ids, *ids[:4]]], EagerBatch.of([ids, ids[:4]]), ops)
    expected = mixing.run([*ids, *ids[:4]], [(9, -1, 0), (13, -1, 1)])
    assert_close(rows, expected)

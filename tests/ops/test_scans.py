"""Recurrences with states in slots: against plain numpy, in segments, on the plain op set and the native one."""

from typing import Any

import numpy as np
import pytest

from quire.ops.compiled import native
from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.opset import Mamba2Weights, MambaWeights, OpSet, ProgramSpec, StepBatch
from quire.ops.tensors import stored_floats

BLOCK, NUM_BLOCKS, MAX_TOKENS, NUM_SLOTS, LAYERS = 4, 24, 64, 9, 2
BACKENDS = ["torch", "native"]
Segments = list[tuple[int, int, int]]  # (end, source, target)
SHAPES = [(1, 1, 1, 1), (6, 3, 5, 20), (8, 2, 16, 64), (4, 4, 12, 100), (3, 1, 130, 7)]  # heads, groups, columns, width


def make_ops(backend: str, threads: int = 2) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps(threads)
    from quire.ops.reference import TorchOps

    return TorchOps(threads=1)


class Scan:
    """Two convolutions and recurrences, one after the other, of rows of a random table."""

    def __init__(self, backend: str, spec: StateSpec, threads: int = 2) -> None:
        self.rng = np.random.default_rng(sum(spec.shape))
        self.spec = spec
        self.ops = make_ops(backend, threads)
        cache_spec = KVSpec(1, 1, 8, BLOCK, "float32", states=spec)
        self.cache: Any = self.ops.new_cache(cache_spec, NUM_BLOCKS)
        if backend == "native":
            self.cache.slots.fill(np.nan)
        else:
            self.cache.slots.conv.fill_(float("nan"))
            self.cache.slots.recurrent.fill_(float("nan"))
        self.weight = self.random(spec.conv_channels, spec.conv_taps)
        weight = self.ops.conv_weight(stored_floats("conv", self.weight))
        self.table = self.random(50, self.width)
        table = self.ops.table(stored_floats("table", self.table))

        def forward(ops: OpSet, batch: Any) -> Any:
            x = ops.embedding(batch.ids, table)
            for layer in range(LAYERS):
                conv, rest = ops.split(x, (spec.conv_channels, self.width - spec.conv_channels))
                x = ops.concat([ops.causal_conv(conv, weight, None, batch, layer), rest])
                x = ops.concat([self.scan(ops, x, batch, layer), x])
                x = ops.split(x, (self.width, self.outputs))[0]
            return ops.rows(x, batch)

        self.program = self.ops.compile(forward, self.cache, ProgramSpec(MAX_TOKENS, 8, MAX_TOKENS))

    width: int
    outputs: int

    def random(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def scan(self, ops: OpSet, x: Any, batch: Any, layer: int) -> Any:
        raise NotImplementedError

    def run(self, ids: list[int], segments: Segments) -> np.ndarray:
        n = len(ids)
        batch = StepBatch(
            ids=np.array(ids, np.int32),
            positions=np.arange(n, dtype=np.int32),
            slots=np.arange(n, dtype=np.int32),
            seq_starts=np.array([0, n], np.int32),
            context_lens=np.array([n], np.int32),
            block_tables=np.arange(MAX_TOKENS // BLOCK, dtype=np.int32)[None],
            logit_rows=np.arange(n, dtype=np.int32),
            states=np.array(segments, np.int32),
        )
        rows = self.program.run(batch)
        return (rows.numpy() if hasattr(rows, "numpy") else rows).copy()

    def expected(self, ids: list[int]) -> np.ndarray:
        x = self.table[ids].astype(np.float64)
        for _ in range(LAYERS):
            x = self.convolved(x)
            x = np.concatenate([self.recurrence(x), x], axis=1)[:, : self.width]
        return x

    def convolved(self, x: np.ndarray) -> np.ndarray:
        channels, taps = self.weight.shape
        padded = np.concatenate([np.zeros((taps - 1, channels)), x[:, :channels]])
        sums = [sum(self.weight[:, tap] * padded[i + tap] for tap in range(taps)) for i in range(len(x))]
        return np.concatenate([np.array(sums), x[:, channels:]], axis=1)

    def recurrence(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


class Mamba2Scan(Scan):
    def __init__(self, backend: str, shape: tuple[int, int, int, int], taps: int = 3, threads: int = 2) -> None:
        self.heads, self.groups, self.columns, self.head_dim = shape
        self.outputs = self.heads * self.head_dim
        self.width = self.outputs + self.heads + 2 * self.groups * self.columns
        self.limit = (0.05, 2.0)
        shape_of_state = (self.heads, self.columns, self.head_dim)
        super().__init__(backend, StateSpec(LAYERS, shape_of_state, self.outputs, taps, NUM_SLOTS), threads)

    def scan(self, ops: OpSet, x: Any, batch: Any, layer: int) -> Any:
        if not hasattr(self, "vectors"):
            self.vectors = [-np.abs(self.random(self.heads)), self.random(self.heads), self.random(self.heads)]
            vectors = [self.ops.vector(stored_floats("v", v)) for v in self.vectors]
            self.weights = Mamba2Weights(*vectors, self.groups, self.limit)
        of_state = self.groups * self.columns
        x, dt, b, c = ops.split(x, (self.outputs, self.heads, of_state, of_state))
        return ops.mamba2_scan(x, dt, b, c, self.weights, batch, layer)

    def recurrence(self, x: np.ndarray) -> np.ndarray:
        a, dt_bias, skip = self.vectors
        of_state = self.groups * self.columns
        x, dt, b, c = np.split(x, np.cumsum([self.outputs, self.heads, of_state]), axis=1)
        delta = np.clip(softplus(dt + dt_bias), *self.limit)
        x = x.reshape(len(x), self.heads, self.head_dim)
        b, c = (v.reshape(len(x), self.groups, self.columns).repeat(self.heads // self.groups, axis=1) for v in (b, c))
        state, out = np.zeros((self.heads, self.columns, self.head_dim)), np.empty_like(x)
        for t in range(len(x)):
            state = np.exp(a * delta[t])[:, None, None] * state
            state += np.einsum("h,hn,hp->hnp", delta[t], b[t], x[t])
            out[t] = np.einsum("hn,hnp->hp", c[t], state) + skip[:, None] * x[t]
        return out.reshape(len(x), -1)


class MambaScan(Scan):
    def __init__(self, backend: str, columns: int, channels: int, taps: int = 4, threads: int = 2) -> None:
        self.columns, self.outputs = columns, channels
        self.width = 2 * channels + 2 * columns
        super().__init__(backend, StateSpec(LAYERS, (columns, channels), channels, taps, NUM_SLOTS), threads)

    def scan(self, ops: OpSet, x: Any, batch: Any, layer: int) -> Any:
        if not hasattr(self, "a"):
            self.a, self.skip = -np.abs(self.random(self.columns, self.outputs)), self.random(self.outputs)
            self.weights = MambaWeights(self.ops.biases(self.a), self.ops.vector(stored_floats("skip", self.skip)))
        x, dt, b, c = ops.split(x, (self.outputs, self.outputs, self.columns, self.columns))
        return ops.mamba_scan(x, ops.scale(dt, 3.0), b, c, self.weights, batch, layer)

    def recurrence(self, x: np.ndarray) -> np.ndarray:
        x, dt, b, c = np.split(x, np.cumsum([self.outputs, self.outputs, self.columns]), axis=1)
        delta = softplus(3.0 * dt)
        state, out = np.zeros((self.columns, self.outputs)), np.empty_like(x)
        for t in range(len(x)):
            state = np.exp(self.a * delta[t]) * state + np.outer(b[t], delta[t] * x[t])
            out[t] = c[t] @ state + self.skip * x[t]
        return out


SCANS = [*(("mamba2", shape) for shape in SHAPES), ("mamba", (16, 48)), ("mamba", (7, 33)), ("mamba", (1, 1))]


def new_scan(backend: str, kind: str, shape: Any, threads: int = 2) -> Scan:
    return (
        Mamba2Scan(backend, shape, threads=threads) if kind == "mamba2" else MambaScan(backend, *shape, threads=threads)
    )


def ids_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "shape"), SCANS)
def test_sequences_of_a_step_give_the_sums_of_each(backend: str, kind: str, shape: Any) -> None:
    scan, first, second = new_scan(backend, kind, shape), ids_of(1, 13), ids_of(2, 1)
    rows = scan.run(first + second, [(13, -1, 3), (14, -1, 0)])
    expected = np.concatenate([scan.expected(first), scan.expected(second)])
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "shape"), SCANS[1:3] + SCANS[5:7])
def test_chunks_and_segments_have_the_bits_of_the_whole(backend: str, kind: str, shape: Any) -> None:
    scan, ids = new_scan(backend, kind, shape), ids_of(3, 19)
    whole = scan.run(ids, [(19, -1, 8)])
    np.testing.assert_array_equal(scan.run(ids, [(1, -1, 0), (4, 0, 1), (9, 1, 0), (16, 0, 2), (19, 2, 2)]), whole)
    for cuts in ([1], [3, 4, 5], [15, 17]):
        chunks = []
        for start, end in zip([0, *cuts], [*cuts, 19], strict=True):
            beside = ids_of(end, 3)
            segments = [(end - start, 5 if start else -1, 5), (end - start + 3, -1, 6)]
            chunks.append(scan.run(ids[start:end] + beside, segments)[: end - start])
        np.testing.assert_array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "shape"), [SCANS[1], SCANS[6]])
def test_a_slot_can_be_continued_by_others_also_in_the_step_that_fills_it(backend: str, kind: str, shape: Any) -> None:
    scan, prefix, mine, yours = new_scan(backend, kind, shape), ids_of(4, 8), ids_of(5, 3), ids_of(6, 6)
    rows = scan.run(prefix + mine + yours, [(8, -1, 1), (11, 1, 2), (17, 1, 3)])
    again = scan.run(prefix + yours, [(14, -1, 4)])
    np.testing.assert_array_equal(rows[11:], again[8:])
    later = scan.run(yours, [(6, 1, 1)])
    np.testing.assert_array_equal(later, again[8:])


@pytest.mark.parametrize(("kind", "shape"), SCANS)
def test_the_number_of_threads_changes_no_bit(kind: str, shape: Any) -> None:
    ids, (one, three) = ids_of(9, 11), (new_scan("native", kind, shape, threads) for threads in (1, 3))
    for part, source in ((ids[:6], -1), (ids[6:], 0)):
        np.testing.assert_array_equal(
            one.run(part, [(len(part), source, 0)]), three.run(part, [(len(part), source, 0)])
        )


@pytest.mark.parametrize(("kind", "shape"), SCANS)
def test_every_isa_gives_the_sums_of_the_plain_one(kind: str, shape: Any) -> None:
    scan, ids, best = new_scan("native", kind, shape), ids_of(7, 9), native.isa()
    try:
        rows = {isa: scan.run(ids, [(9, -1, 0)]) for isa in native.available_isas() if native.use_isa(isa)}
    finally:
        native.use_isa(best)
    for isa, found in rows.items():
        limit = 1e-5 * np.abs(rows["plain"]).max()
        np.testing.assert_allclose(found, rows["plain"], rtol=1e-4, atol=limit, err_msg=isa)


@pytest.mark.parametrize("segments", [[(3, -1, 9)], [(3, 9, 0)], [(2, -1, 0)], [(3, -1, -1)], [(2, -1, 0), (1, 0, 0)]])
def test_segments_that_do_not_fit_are_refused(segments: Segments) -> None:
    scan = new_scan("native", "mamba2", SHAPES[1])
    with pytest.raises(ValueError, match="segment"):
        scan.run([1, 2, 3], segments)

"""Linear attention with states in slots: against transformers, in segments, on the plain op set and the native one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.native import available_isas, use_isa
from quire.ops.opset import Activation, OpSet, ProgramSpec, StepBatch
from quire.ops.tensors import stored_floats
from quire.quantize.eager_ops import EagerBatch, EagerOps

BLOCK, NUM_BLOCKS, MAX_TOKENS, NUM_SLOTS = 4, 32, 128, 9
BACKENDS = ["torch", "native"]
SHAPES = [(1, 1, 1, 1), (2, 6, 5, 20), (2, 4, 16, 64), (1, 3, 12, 100), (3, 3, 130, 70)]
KINDS = ["gated", "kimi", "lightning"]
Segments = list[tuple[int, int, int]]  # (end, source, target)


def make_ops(backend: str, threads: int = 2) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps(threads)
    from quire.ops.reference import TorchOps

    return TorchOps(threads=1)


class LinearAttention:
    """q, k, v, and the inputs of decay and beta, are columns of rows of a random table."""

    def __init__(
        self, backend: str, kind: str, shape: tuple[int, int, int, int], threads: int = 2, tiled: bool = False
    ) -> None:
        self.kind, self.tiled = kind, tiled
        self.key_heads, self.heads, self.key_dim, self.value_dim = shape
        if kind != "gated":
            self.key_heads = self.heads
        num_decays = self.heads * (self.key_dim if kind == "kimi" else 1)
        keys = self.key_heads * self.key_dim
        self.sizes = (keys, keys, self.heads * self.value_dim, num_decays, self.heads)
        rng = np.random.default_rng(sum(shape))
        self.table = rng.normal(size=(50, sum(self.sizes))).astype(np.float32)
        self.table[:, : 2 * keys] /= np.sqrt(self.key_dim)
        self.bias = rng.normal(size=num_decays).astype(np.float32)
        self.rate = rng.uniform(0.05, 4, num_decays).astype(np.float32)
        self.ops = make_ops(backend, threads)
        spec = StateSpec(1, (self.heads, self.key_dim, self.value_dim), num_slots=NUM_SLOTS)
        self.cache: Any = self.ops.new_cache(KVSpec(1, 1, 8, BLOCK, "float32", states=spec), NUM_BLOCKS)
        if backend == "native":
            self.cache.slots.fill(np.nan)
        else:
            self.cache.slots.recurrent.fill_(float("nan"))
        self.compiled()

    def compiled(self) -> "LinearAttention":
        """With the table and the vectors as they are now."""
        table = self.ops.table(stored_floats("table", self.table))

        def forward(ops: OpSet, batch: Any) -> Any:
            return ops.rows(self.attend(ops, ops.embedding(batch.ids, table), batch, self.ops), batch)

        self.program = self.ops.compile(forward, self.cache, ProgramSpec(MAX_TOKENS, 8, MAX_TOKENS))
        return self

    def attend(self, ops: Any, rows: Any, batch: Any, loader: Any) -> Any:
        vectors = [loader.vector(stored_floats("v", v)) for v in (self.bias, self.rate, np.exp(-self.rate))]
        q, k, v, decay, beta = ops.split(rows, self.sizes)
        if self.kind == "lightning":
            return ops.linear_attention(q, k, v, vectors[2], batch, 0, self.key_dim)
        decay = ops.decay(decay, *vectors[:2])
        beta = ops.activate(beta, Activation.SIGMOID)
        return ops.delta_rule(q, k, v, decay, beta, batch, 0, self.key_dim, self.tiled)

    def run(self, ids: list[int], segments: Segments) -> np.ndarray:
        n = len(ids)
        batch = StepBatch(
            ids=np.array(ids, np.int32),
            positions=np.arange(n, dtype=np.int32),
            slots=np.arange(n, dtype=np.int32),
            seq_starts=np.array([0, n], np.int32),
            context_lens=np.array([n], np.int32),
            block_tables=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
            logit_rows=np.arange(n, dtype=np.int32),
            states=np.array(segments, np.int32),
        )
        rows = self.program.run(batch)
        return (rows.numpy() if hasattr(rows, "numpy") else rows).copy()

    def inputs(self, ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """q, k and v [1, n, heads, columns], the logarithms of decays, and betas."""
        parts = torch.split(torch.from_numpy(self.table[ids]), self.sizes, dim=1)
        q, k = (x.unflatten(1, (self.key_heads, self.key_dim)) for x in parts[:2])
        q, k = (x.repeat_interleave(self.heads // self.key_heads, 1) for x in (q, k))
        v = parts[2].unflatten(1, (self.heads, self.value_dim))
        decay = -torch.from_numpy(self.rate) * torch.nn.functional.softplus(parts[3] + torch.from_numpy(self.bias))
        decay = decay.unflatten(1, (self.heads, self.key_dim)) if self.kind == "kimi" else decay
        scale = self.key_dim**0.5  # transformers divides q by it
        return [x[None] for x in (q * scale, k, v)], decay[None], parts[4].sigmoid()[None]

    def expected(self, ids: list[int], chunked: bool) -> np.ndarray:
        qkv, decay, beta = self.inputs(ids)
        if self.kind == "lightning":
            return self.with_fixed_decays(*(x[0].double().numpy() for x in qkv))
        kimi = (recurrent_kimi_delta_attention, chunk_kimi_delta_attention)
        gated = (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule)
        rule = (kimi if self.kind == "kimi" else gated)[chunked]
        out, _ = rule(*qkv, g=decay, beta=beta, initial_state=None, output_final_state=False)
        return out[0].flatten(1).numpy()

    def with_fixed_decays(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Each output as a sum over all tokens before it."""
        n, rows = len(q), []
        for t in range(n):
            ages = np.exp(-self.rate[:, None] * (t - np.arange(t + 1)))  # [heads, t + 1]
            scores = np.einsum("hk,shk->hs", q[t], k[: t + 1]) / self.key_dim**0.5 * ages
            rows.append(np.einsum("hs,shv->hv", scores, v[: t + 1]).ravel())
        return np.array(rows)


def ids_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


def assert_close(rows: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_those_of_transformers(backend: str, shape: Any, kind: str) -> None:
    attention, first, second = LinearAttention(backend, kind, shape), ids_of(1, 70), ids_of(2, 1)
    rows = attention.run(first + second, [(70, -1, 3), (71, -1, 0)])
    for chunked in (False, True):
        assert_close(rows[:70], attention.expected(first, chunked))
        assert_close(rows[70:], attention.expected(second, chunked))


@pytest.fixture
def best_isa_again() -> Iterator[None]:
    yield
    use_isa(available_isas()[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", available_isas()[1:])
def test_other_isas_differ_by_rounding(isa: str, kind: str, best_isa_again: None) -> None:
    use_isa(isa)
    attention, ids = LinearAttention("native", kind, SHAPES[4]), ids_of(8, 20)
    assert_close(attention.run(ids, [(9, -1, 3), (20, 3, 0)]), attention.expected(ids, chunked=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_may_take_the_key_heads_in_turn(backend: str) -> None:
    grouped, ids = LinearAttention(backend, "gated", SHAPES[1]), ids_of(8, 9)
    tiled = LinearAttention(backend, "gated", SHAPES[1], tiled=True)
    order = np.arange(6).reshape(2, 3).T.ravel()  # of heads that share two key heads, three each
    starts = np.cumsum([0, *grouped.sizes])
    for part, width in ((2, 20), (3, 1), (4, 1)):
        columns = grouped.table[:, starts[part] : starts[part + 1]].reshape(50, 6, width)
        tiled.table[:, starts[part] : starts[part + 1]] = columns[:, order].reshape(50, -1)
    tiled.bias[:], tiled.rate[:] = grouped.bias[order], grouped.rate[order]
    rows = grouped.run(ids, [(9, -1, 0)]).reshape(9, 6, 20)[:, order]
    assert_close(tiled.compiled().run(ids, [(9, -1, 0)]), rows.reshape(9, -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_and_segments_have_the_bits_of_the_whole(backend: str, kind: str) -> None:
    attention, ids = LinearAttention(backend, kind, SHAPES[3]), ids_of(3, 19)
    whole = attention.run(ids, [(19, -1, 8)])
    segments = [(1, -1, 0), (4, 0, 1), (9, 1, 0), (16, 0, 2), (19, 2, 2)]
    np.testing.assert_array_equal(attention.run(ids, segments), whole)
    for cuts in ([1], [3, 4, 5], [15, 17]):
        chunks = []
        for start, end in zip([0, *cuts], [*cuts, 19], strict=True):
            segments = [(end - start, 5 if start else -1, 5), (end - start + 3, -1, 6)]
            chunks.append(attention.run(ids[start:end] + ids_of(end, 3), segments)[: end - start])
        np.testing.assert_array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_can_be_continued_by_others_also_in_the_step_that_fills_it(backend: str) -> None:
    attention, prefix, mine, yours = (
        LinearAttention(backend, "gated", SHAPES[1]),
        ids_of(4, 8),
        ids_of(5, 3),
        ids_of(6, 6),
    )
    rows = attention.run(prefix + mine + yours, [(8, -1, 1), (11, 1, 2), (17, 1, 3)])
    again = attention.run(prefix + yours, [(14, -1, 4)])
    np.testing.assert_array_equal(rows[11:], again[8:])
    np.testing.assert_array_equal(attention.run(yours, [(6, 1, 1)]), again[8:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_threads_changes_no_bit(shape: Any, kind: str) -> None:
    ids, (one, three) = ids_of(9, 11), (LinearAttention("native", kind, shape, threads) for threads in (1, 3))
    for part, source in ((ids[:6], -1), (ids[6:], 0)):
        segments = [(len(part), source, 0)]
        np.testing.assert_array_equal(one.run(part, segments), three.run(part, segments))


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_computes_the_same(kind: str) -> None:
    attention, ids = LinearAttention("torch", kind, SHAPES[1]), ids_of(7, 9)
    ops = EagerOps()
    rows = attention.attend(ops, attention.table[[*ids, *ids[:4]]], EagerBatch.of([ids, ids[:4]]), ops)
    expected = attention.expected(ids, chunked=False)
    assert_close(rows, np.concatenate([expected, expected[:4]]))


FAR = np.concatenate([np.linspace(-90, 90, 301), [-1000, 1000]]).astype(np.float32)


def decays_of(backend: str, decay: Callable[[Any, Any, Any, Any], Any]) -> np.ndarray:
    """decay(ops, x, bias, rate) of FAR, with biases of 0.25 and rates of 0.125"""
    ops = make_ops(backend)
    table = ops.table(stored_floats("x", FAR[None]))
    bias, rate = (ops.vector(stored_floats("v", np.full(len(FAR), value, np.float32))) for value in (0.25, 0.125))

    def forward(ops: OpSet, batch: Any) -> Any:
        return ops.rows(decay(ops, ops.embedding(batch.ids, table), bias, rate), batch)

    cache = ops.new_cache(KVSpec(1, 1, 8, BLOCK, "float32"), 1)
    one = np.zeros(1, np.int32)
    batch = StepBatch(one, one, one, np.array([0, 1], np.int32), one + 1, one[None], one)
    return np.asarray(ops.compile(forward, cache, ProgramSpec(1, 1, 1)).run(batch))[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_decays_are_exact_far_from_zero(backend: str) -> None:
    decays = decays_of(backend, lambda ops, x, bias, rate: ops.decay(x, bias, rate))
    softplus = np.logaddexp(0, FAR.astype(np.float64) + 0.25)
    np.testing.assert_allclose(decays, np.exp(-0.125 * softplus), rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(1 - decays.astype(np.float64), -np.expm1(-0.125 * softplus), atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounded_decays_are_exact_far_from_zero(backend: str) -> None:
    decays = decays_of(backend, lambda ops, x, bias, rate: ops.bounded_decay(x, bias, rate, -5.0))
    assert_close_to_bounded(decays)


def test_calibration_bounds_decays_as_op_sets_do() -> None:
    bias, rate = np.full_like(FAR, 0.25), np.full_like(FAR, 0.125)
    assert_close_to_bounded(EagerOps().bounded_decay(FAR[None], bias, rate, -5.0)[0])


def assert_close_to_bounded(decays: np.ndarray) -> None:
    log = -5 / (1 + np.exp(-0.125 * (FAR.astype(np.float64) + 0.25)))
    assert log.max() > -1e-15 and log.min() == -5
    np.testing.assert_allclose(decays, np.exp(log), rtol=2e-6, atol=1.5e-7)

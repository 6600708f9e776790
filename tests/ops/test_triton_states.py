"""Kernels that read and leave states against plain torch: interpreted where there is no GPU, else compiled."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.gpu.head_norm import norm_heads
from quire.ops.gpu.pointwise import gate_rows
from quire.ops.gpu.states.causal_conv import causal_conv
from quire.ops.gpu.states.functions import log_decay
from quire.ops.gpu.states.linear_attention import Decays, Gates, attend_tokens
from quire.ops.gpu.states.mamba import mamba_scan
from quire.ops.gpu.states.segments import DeviceSegments, segments_on_device
from quire.ops.opset import Activation, Mamba2Weights, MambaWeights, StepBatch
from quire.ops.reference import linear_attention, mamba
from quire.ops.reference.causal_conv import conv_in_slots
from quire.ops.reference.opset import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 9
Segments = list[tuple[int, int, int]]  # (end, source, target)
TOGETHER: Segments = [
    (1, 3, 3),  # a sequence that decodes
    (9, -1, 0),  # a prompt that leaves a checkpoint,
    (12, 0, 1),
    (14, 0, 2),  # and one that continues it in the same step
    (15, 4, 4),  # drafts: a state after each token, the first where it came from
    (16, 4, 5),
    (17, 5, 6),
]
DECODES: Segments = [(1, 3, 3), (2, 4, 0), (3, -1, 5)]
KINDS = ["gated", "kimi", "lightning", "mamba2"]
SHAPES = [(1, 1, 1, 1), (1, 2, 12, 36)]  # key heads, heads, key_dim, value_dim


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def on_device(segments: Segments, taps: int = 1) -> DeviceSegments:
    num_tokens, nothing = segments[-1][0], np.zeros(0, np.int32)
    ids = np.zeros(num_tokens, np.int32)
    batch = StepBatch(ids, ids, ids, nothing, nothing, nothing, nothing, states=np.array(segments, np.int32))
    return segments_on_device(batch, taps, torch.device(DEVICE))


def assert_close(found: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=10 * bound, atol=bound * float(expected.abs().max()))


# -- causal convolutions -----------------------------------------------------------------------------------------------


def convolutions(taps: int, channels: int = 37) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A state that no segment of the tests reads before it is written is no number."""
    slots = randn(NUM_SLOTS, taps - 1, channels, seed=3)
    slots[[0, 1, 2, 5, 6, 7, 8]] = float("nan")
    return randn(17, channels), randn(taps, channels, seed=1), randn(channels, seed=2), slots


@pytest.mark.parametrize("segments", [TOGETHER, DECODES], ids=["together", "decodes"])
@pytest.mark.parametrize("taps", [1, 2, 4, 9])
def test_convolutions_and_the_states_they_leave(taps: int, segments: Segments) -> None:
    x, weight, bias, slots = convolutions(taps)
    x, added = x[: segments[-1][0]], bias if taps % 2 else None
    expected_slots = slots.clone()
    expected = conv_in_slots(x, weight, added, expected_slots, segments)
    assert_close(causal_conv(x, weight, added, slots, on_device(segments, taps)), expected)
    assert torch.equal(slots.nan_to_num(7.0), expected_slots.nan_to_num(7.0))


def test_a_convolution_activates_what_it_gives() -> None:
    x, weight, bias, slots = convolutions(4)
    expected = F.silu(conv_in_slots(x, weight, bias, slots.clone(), TOGETHER))
    assert_close(causal_conv(x, weight, bias, slots, on_device(TOGETHER, 4), Activation.SILU), expected)


@pytest.mark.parametrize("taps", [2, 5])
def test_chunks_of_a_convolution_have_the_bits_of_the_whole(taps: int) -> None:
    x, weight, bias, slots = convolutions(taps)
    x = x.to(torch.bfloat16)
    whole = causal_conv(x, weight, bias, slots, on_device([(17, -1, 0)], taps))
    parts, source = [], -1
    for first, end in ((0, 1), (1, 7), (7, 8), (8, 9), (9, 17)):
        parts.append(causal_conv(x[first:end], weight, bias, slots, on_device([(end - first, source, 1)], taps)))
        source = 1
    assert torch.equal(torch.cat(parts), whole) and torch.equal(slots[0], slots[1])


# -- linear attention --------------------------------------------------------------------------------------------------


class Attention:
    """Random inputs of a recurrence, and its plain twin."""

    def __init__(self, kind: str, shape: tuple[int, int, int, int], num_tokens: int, seed: int = 0) -> None:
        key_heads, heads, key_dim, value_dim = shape
        self.kind, self.heads = kind, heads
        self.q = randn(num_tokens, key_heads * key_dim, seed=seed) / key_dim**0.5
        self.k = F.normalize(randn(num_tokens, key_heads, key_dim, seed=seed + 1), dim=-1).flatten(1)
        self.v = randn(num_tokens, heads * value_dim + 3, seed=seed + 2)[:, 3:]  # rows are strided
        num_decays = heads * key_dim if kind == "kimi" else heads
        self.raw = randn(num_tokens, num_decays, seed=seed + 3)
        self.beta = randn(num_tokens, heads, seed=seed + 4).sigmoid() * 2
        self.rates = randn(heads, seed=seed + 5).abs() + 0.01
        self.dt_bias, self.skip = randn(heads, seed=seed + 6), randn(heads, seed=seed + 7)
        self.slots = randn(NUM_SLOTS, heads, key_dim, value_dim, seed=seed + 8)

    @property
    def gates(self) -> Gates:
        if self.kind == "lightning":
            return Gates(Decays.HEAD, torch.exp(-self.rates))
        if self.kind == "mamba2":
            return Gates(Decays.MAMBA2, self.raw, None, self.dt_bias, -self.rates, self.skip, 0.05, 2.0)
        kind = Decays.ROW if self.kind == "kimi" else Decays.TOKEN
        return Gates(kind, -F.softplus(self.raw), self.beta)

    def run(self, attend: Any, segments: Segments, first: int = 0, slots: Tensor | None = None) -> Tensor:
        tokens = slice(first, first + segments[-1][0])
        gates = self.gates
        if gates.kind != Decays.HEAD:
            gates = Gates(
                gates.kind, gates.decay[tokens], None if gates.beta is None else gates.beta[tokens], gates.dt_bias,
                gates.a, gates.skip, gates.min_delta, gates.max_delta,
            )  # fmt: skip
        given = self.q[tokens], self.k[tokens], self.v[tokens]
        return attend(*given, gates, self.slots if slots is None else slots, on_device(segments))

    def expected(self, slots: Tensor, segments: Segments) -> Tensor:
        n = segments[-1][0]
        q, k, v = (x[:n].cpu().double() for x in (self.q, self.k, self.v))
        if self.kind == "mamba2":
            vectors = [x.cpu().double() for x in (-self.rates, self.dt_bias, self.skip)]
            weights = Mamba2Weights(*vectors, self.q.shape[1] // slots.shape[2], (0.05, 2.0))
            return mamba.mamba2_scan(v, self.raw[:n].cpu().double(), k, q, weights, slots, segments)
        gates = self.gates
        decay = gates.decay.expand(n, -1) if gates.kind == Decays.HEAD else torch.exp(gates.decay[:n])
        beta = None if gates.beta is None else gates.beta[:n].cpu().double()
        return linear_attention.attend_states(q, k, v, decay.cpu().double(), beta, slots, segments)

    def check(self, attend: Any, segments: Segments, bound: float = 1e-5) -> None:
        expected_slots = self.slots.cpu().double()
        expected = self.expected(expected_slots, segments)
        found = self.run(attend, segments)
        assert_close(found.cpu().double(), expected, bound)
        assert_close(self.slots.cpu().double(), expected_slots, bound)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_after_the_other(kind: str, shape: Any) -> None:
    Attention(kind, shape, 17).check(attend_tokens, TOGETHER)
    Attention(kind, shape, 3).check(attend_tokens, DECODES)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_company_have_the_bits_of_the_whole(kind: str) -> None:
    attention = Attention(kind, (1, 1, 12, 20), 20)
    whole = attention.run(attend_tokens, [(20, -1, 0)])
    parts, source = [], -1
    for first, end in ((0, 1), (1, 7), (7, 8), (8, 20)):
        segments = [(end - first, source, 1)]
        if end < 20:  # beside another sequence
            parts.append(attention.run(attend_tokens, [*segments, (end - first + 1, 4, 5)], first)[:-1])
        else:
            parts.append(attention.run(attend_tokens, [(3, source, 2), (end - first, 2, 1)], first))
        source = 1
    assert torch.equal(torch.cat(parts), whole) and torch.equal(attention.slots[0], attention.slots[1])


def test_what_is_no_number_stays_in_its_sequence() -> None:
    attention, poisoned = Attention("gated", (1, 1, 16, 16), 70), Attention("gated", (1, 1, 16, 16), 70)
    segments = [(20, -1, 0), (70, 3, 1)]
    expected = attention.run(attend_tokens, segments)
    for value in (poisoned.k, poisoned.v, poisoned.raw, poisoned.beta):
        value[5] = float("nan")
    found = poisoned.run(attend_tokens, segments)
    assert found[5:20].isnan().all()
    assert_close(found[20:], expected[20:], 3e-5)


# -- Mamba -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "channels"), [(16, 70), (7, 33), (1, 1)])
def test_selective_scan(columns: int, channels: int) -> None:
    weights = MambaWeights(-randn(columns, channels, seed=1).abs(), randn(channels, seed=2))
    plain = MambaWeights(weights.a.cpu(), weights.skip.cpu())
    for segments in (TOGETHER, DECODES):
        n = segments[-1][0]
        x, dt, b, c = (randn(n, size, seed=i) for i, size in enumerate((channels, channels, columns, columns)))
        slots = randn(NUM_SLOTS, columns, channels, seed=9)
        expected_slots = slots.cpu().clone()
        expected = mamba.mamba_scan(*(value.cpu() for value in (x, dt, b, c)), plain, expected_slots, segments)
        assert_close(mamba_scan(x, dt, b, c, weights, slots, on_device(segments)).cpu(), expected)
        assert_close(slots.cpu(), expected_slots)


def test_chunks_of_a_selective_scan_have_the_bits_of_the_whole() -> None:
    weights = MambaWeights(-randn(16, 70, seed=1).abs(), randn(70, seed=2))
    x, dt, b, c = (randn(17, size, seed=i, dtype=torch.bfloat16) for i, size in enumerate((70, 70, 16, 16)))
    slots = randn(NUM_SLOTS, 16, 70, seed=9)
    whole = mamba_scan(x, dt, b, c, weights, slots, on_device([(17, -1, 0)]))
    parts, source = [], -1
    for first, end in ((0, 1), (1, 8), (8, 17)):
        given = (value[first:end] for value in (x, dt, b, c))
        parts.append(mamba_scan(*given, weights, slots, on_device([(end - first, source, 1)])))
        source = 1
    assert torch.equal(torch.cat(parts), whole) and torch.equal(slots[0], slots[1])


# -- functions beside them ---------------------------------------------------------------------------------------------


def test_decays_are_exact_far_from_zero() -> None:
    x = torch.cat([torch.linspace(-90, 90, 301), torch.tensor([-1000.0, 1000.0])]).to(DEVICE)
    bias, rate = torch.full_like(x, 0.25), torch.full_like(x, 0.125)
    expected = -0.125 * F.softplus(x.double() + 0.25, threshold=1000)
    torch.testing.assert_close(log_decay(x[None], bias, rate)[0].double(), expected, rtol=5e-6, atol=1e-37)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.SIGMOID])
def test_norms_of_heads_and_gates(activation: Activation) -> None:
    x, gate = randn(5, 69)[:, 3:69], randn(5, 66, seed=1)
    for weight in (randn(22, seed=2), randn(66, seed=2)):
        heads = x.unflatten(1, (3, 22))
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5) * weight.view(-1, 22)
        assert_close(norm_heads(x, weight, 1e-5, 22), normed.flatten(1))
        gated = normed.flatten(1) * ACTIVATIONS[activation](gate)
        assert_close(norm_heads(x, weight, 1e-5, 22, gate, activation), gated)
    assert_close(gate_rows(x, gate, activation), x * ACTIVATIONS[activation](gate))

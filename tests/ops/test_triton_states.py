"""Kernels that read and leave states against plain torch: interpreted where there is no GPU, else compiled."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.recurrences import DEVICE, KINDS, NUM_SLOTS, Attention, Segments, assert_close, on_device, randn
from quire.ops.gpu.head_norm import norm_heads
from quire.ops.gpu.pointwise import gate_rows
from quire.ops.gpu.states.causal_conv import causal_conv
from quire.ops.gpu.states.functions import log_bounded_decay, log_decay
from quire.ops.gpu.states.linear_attention import attend_tokens
from quire.ops.gpu.states.mamba import mamba_scan
from quire.ops.opset import Activation, MambaWeights
from quire.ops.reference import mamba
from quire.ops.reference.causal_conv import conv_in_slots
from quire.ops.reference.opset import ACTIVATIONS

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
SHAPES = [(1, 1, 1, 1), (1, 2, 12, 36)]  # key heads, heads, key_dim, value_dim


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_with_a_bound_keep_fp32_where_they_are_near_one(dtype: torch.dtype) -> None:
    wide = torch.linspace(-60, 60, 2 * 1200, device=DEVICE).view(2, 1200).to(dtype)
    x = wide[:, :1100]  # rows are strided, and more than a block
    bias, rate = (torch.linspace(*ends, 1100, device=DEVICE) for ends in ((-2, 3), (0.1, 1.4)))
    expected = -5 * torch.sigmoid(rate.double() * (x.double() + bias.double()))
    assert expected.min() == -5 and expected.max() > -1e-9
    torch.testing.assert_close(log_bounded_decay(x, bias, rate, -5.0).double(), expected, rtol=2e-5, atol=1e-37)


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

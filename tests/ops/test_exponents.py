"""Scales of MXFP4 as bytes: which have one, where it lies, and that no weight changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.gemms import DEVICE, HALF, integers, randn, spread
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.e2m1 import E2M1
from quire.ops.gpu.linear.exponents import EXPONENT, by_group, exponents_of, scales_of
from quire.ops.gpu.linear.grouped import grouped_kernel
from quire.ops.gpu.linear.grouped_config import grouped_config
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4
from quire.ops.gpu.linear.wide_format import slab_format
from quire.ops.gpu.moe.few_formats import few_format
from quire.ops.gpu.moe.moe import moe_mlp
from quire.ops.gpu.moe.quantized import can_stack, stack_experts
from quire.ops.gpu.weights import load_experts
from quire.ops.tensors import MXFP4, StoredTensor
from quire.planning.packed_bytes import GpuFormat

LEAST, MOST = -69, 64  # of the exponents that have a byte
BF16 = torch.bfloat16


def mxfp4(rows: int, K: int, exponents: Tensor, width: int = 0) -> tuple[GroupedWeight, Tensor]:
    """-> packed, and the fp32 matrix that it stands for"""
    q, scales = integers(0, 16, rows, K), 2.0 ** exponents.to(DEVICE).float()
    plain = spread(scales, K) * torch.tensor(E2M1, device=DEVICE)[q]
    return pack_codebook4(q.to(torch.uint8), scales, E2M1, width), plain


def test_a_byte_says_every_scale_from_the_least_to_the_most() -> None:
    for exponent in range(-149, 128):
        scales = torch.ldexp(torch.ones(2), torch.tensor(exponent))
        found = exponents_of(scales)
        if LEAST <= exponent <= MOST:
            assert found is not None and found.tolist() == [exponent + EXPONENT] * 2
            assert torch.equal(scales_of(found), scales)
        else:
            assert found is None, exponent
    none = exponents_of(torch.zeros(2))
    assert none is not None and none.tolist() == [0, 0] and scales_of(none).tolist() == [0, 0]
    for other in (1.5, -1.0, torch.inf, torch.nan):
        assert exponents_of(torch.tensor([1.0, other])) is None


@pytest.mark.parametrize("width,groups", [(16, 4), (32, 8)])
def test_bytes_of_a_chunk_lie_together_and_make_the_weights(width: int, groups: int) -> None:
    """All scales that have a byte, and 0 past the last input, half a chunk before its end."""
    num_groups = 5 * groups // 2
    exponents = torch.arange(LEAST, MOST + 1)[: 13 * num_groups].repeat(2)[: 13 * num_groups].view(13, num_groups)
    weight, plain = mxfp4(13, 32 * num_groups, exponents, width)
    assert weight.has_exponents and weight.scales.shape == (3, 13, groups)
    assert weight.scales[1, 7].tolist() == (exponents[7, groups : 2 * groups] + EXPONENT).tolist()
    assert not weight.scales[2, :, groups // 2 :].any()
    assert torch.equal(by_group(weight.scales)[:num_groups].T, 2.0 ** exponents.to(DEVICE).float())
    assert torch.equal(dequantize(weight, BF16).float(), plain)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("M", [1, 17, 40])
@pytest.mark.parametrize("K", [480, 768])
def test_matmuls_have_the_bits_that_they_have_with_floats(K: int, M: int, batch_invariant: bool) -> None:
    weight, _ = mxfp4(24, K, integers(-9, 4, 24, K // 32, seed=1))
    floats, x = replace(weight, scales=by_group(weight.scales)), randn(M, K, seed=2).to(HALF)
    config = grouped_config(M, weight, batch_invariant)
    assert torch.equal(grouped_kernel(x, weight, None, config), grouped_kernel(x, floats, None, config))


@pytest.mark.parametrize("T", [1, 20])
def test_experts_have_the_bits_that_they_have_with_floats(T: int) -> None:
    sizes = ((192, 480), (480, 96))
    experts = [stack_experts([mxfp4(3 * N, K, integers(-9, -3, 3 * N, K // 32))[0]], 3) for N, K in sizes]
    floats = [replace(one, rows=replace(one.rows, scales=by_group(one.rows.scales))) for one in experts]
    given = (randn(T, 480) * 0.1).to(HALF), integers(0, 3, T, 2).int(), randn(T, 2).softmax(-1)
    found, expected = (moe_mlp(*given, *both, batch_invariant=True) for both in (experts, floats))
    assert torch.equal(found, expected)


def test_scales_of_one_chunk_are_in_the_order_of_all() -> None:
    """They were a view of the bytes' order, which kernels do not read."""
    assert by_group(torch.zeros(1, 5, 4, dtype=torch.uint8)).stride() == (5, 1)


def test_a_scale_that_has_no_byte_leaves_all_as_floats() -> None:
    for least in (LEAST - 1, -100):
        weight, plain = mxfp4(5, 384, torch.full((5, 12), -3).index_fill(1, torch.tensor([7]), least))
        assert not weight.has_exponents and weight.scales.dtype == torch.float32
        assert torch.equal(dequantize(weight, BF16).float(), plain)
        form = few_format(weight)
        assert slab_format(weight) is None and form is not None and form.kind == "floats"


def test_a_group_of_zeros_may_have_any_scale() -> None:
    """The least that a file can say kept all scales of a matrix from being bytes."""
    q, scales = integers(0, 16, 5, 384).to(torch.uint8), torch.full((5, 12), 2.0**-3, device=DEVICE)
    q[2, 64:96], q[3, 64:96], scales[2:4, 2] = 0, 8, 2.0**-128  # 8: -0
    weight = pack_codebook4(q, scales, E2M1)
    assert weight.has_exponents
    assert torch.equal(
        dequantize(weight, BF16).float(), spread(scales, 384) * torch.tensor(E2M1, device=DEVICE)[q.int()]
    )
    scales[0, 0] = 2.0**-128
    assert not pack_codebook4(q, scales, E2M1).has_exponents


def test_experts_with_and_without_bytes_are_stacked_as_floats() -> None:
    cases = [mxfp4(8, 384, torch.full((8, 12), exponent)) for exponent in (-3, -100, 5)]
    weights = [weight for weight, _ in cases]
    assert [weight.has_exponents for weight in weights] == [True, False, True] and can_stack(weights)
    rows = stack_experts(weights, 3).rows
    assert rows.scales.shape == (12, 24) and rows.scales.dtype == torch.float32
    assert torch.equal(dequantize(rows, BF16).float(), torch.cat([plain for _, plain in cases]))
    rows = stack_experts(weights[::2], 2).rows
    assert rows.scales.shape == (3, 16, 4) and rows.has_exponents
    assert torch.equal(dequantize(rows, BF16).float(), torch.cat([plain for _, plain in cases[::2]]))


def test_experts_of_gpt_oss_take_a_byte_for_32_values() -> None:
    """2,880 inputs are 23 chunks of 128. The scales were there twice, as floats and as bytes."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 64, 90, 17), dtype=np.uint8)
    blocks[..., 0] = rng.integers(100, 130, blocks.shape[:-1])
    tensors = [StoredTensor("w", (64, 2880), MXFP4, rows.reshape(64, -1)) for rows in blocks]
    experts = load_experts([[tensor] for tensor in tensors], BF16, torch.device("cpu"), None)
    assert not isinstance(experts, Tensor)
    assert experts.nbytes * 8 == 4.25 * 2 * 64 * 23 * 128
    assert experts.nbytes == sum(GpuFormat().packed(tensor, None)[1] for tensor in tensors)

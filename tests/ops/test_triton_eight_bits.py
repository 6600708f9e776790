"""4-bit weights with zero points, and 8-bit activations (W8A8, W4A8), in Triton beside their plain definitions:
interpreted where there is no GPU, else compiled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.gemms import DEVICE, HALF, assert_close, integers, randn, spread
from ops.ptx import execute
from quire.core.errors import Unsupported
from quire.ops.gpu.linear import unpack
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import grouped_kernel, grouped_linear
from quire.ops.gpu.linear.grouped_config import GroupedConfig
from quire.ops.gpu.linear.grouped_gemv import can_gemv
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, are_zero_points, pack_int4, pack_zero_points
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.scaled import MAX_INT8_KERNEL_ROWS, ScaledConfig, ScaledWeight, scaled_kernel, scaled_linear
from quire.ops.gpu.linear.w4a8 import TO_FP8, W4A8Weight, pack_w4a8, w4a8_kernel, w4a8_linear
from quire.ops.gpu.linear.w4a8_gemv import can_gemv_shuffled, w4a8_gemv
from quire.ops.gpu.linear.w4a8_instructions import UNIT
from quire.ops.gpu.moe.quantized import stack_experts
from quire.ops.gpu.weights import QUANTIZERS, load_experts, load_segments
from quire.ops.reference import quantized_linear as plain
from quire.ops.tensors import F32, Q8_F, stored_floats
from quire.weights.blocks import int4_blocks, int8_blocks

pytestmark = pytest.mark.slow
N, K = 70, 512


def zero_point_case(group: int, K: int = K) -> tuple[GroupedWeight, Tensor]:
    q, scales, points = (
        integers(0, 16, N, K),
        randn(N, K // group, seed=1).half(),
        integers(0, 17, N, K // group, seed=2),
    )
    return pack_zero_points(q.to(torch.uint8), scales, points), spread(scales, K) * (q - spread(points, K))


# -- zero points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 64, 128, 512])
def test_zero_points_are_subtracted(group: int) -> None:
    weight, numbers = zero_point_case(group)
    assert can_gemv(weight) and not weight.has_offsets
    torch.testing.assert_close(dequantize(weight, HALF).float(), numbers, rtol=torch.finfo(HALF).eps, atol=1e-5)
    for M in (1, 17):
        x = randn(M, K, seed=3).to(HALF)
        assert_close(grouped_linear(x, weight), x, numbers, tolerance=2e-5)


def test_weights_with_scales_are_those_that_dequantizing_gives() -> None:
    for weight, _ in (
        zero_point_case(128),
        (pack_int4(integers(0, 16, N, K).to(torch.uint8), *2 * [randn(N, K // 32).half()]), 0),
    ):
        x = randn(40, K, seed=3).to(HALF)
        y = grouped_kernel(x, weight, None, GroupedConfig(32, 64, 2, False, 4, 2, fold=True))
        assert_close(y, x, dequantize(weight, HALF))


def test_groups_of_experts_have_zero_points_too() -> None:
    weight, numbers = zero_point_case(128)
    stacked = stack_experts([weight, weight], 2).rows
    assert stacked.has_zero_points
    assert torch.equal(dequantize(stacked, HALF)[N:], dequantize(weight, HALF)) and len(numbers) == N


@pytest.mark.parametrize(
    "zeros,kept", [([[0.0, 8.0]], True), ([[16.0, 127.0]], True), ([[7.5, 8.0]], False), ([[-1.0, 3.0]], False)]
)
def test_zeros_that_are_small_integers_are_zero_points(zeros: list[list[float]], kept: bool) -> None:
    assert are_zero_points(torch.tensor(zeros)) is kept
    q = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16
    tensor = int4_blocks(
        "w", (1, 64), lambda first, last: q[first:last], np.ones((1, 2), np.float32), np.float32(zeros)
    )
    weight = load_quantized([tensor], torch.device(DEVICE))
    assert isinstance(weight, GroupedWeight) and weight.has_zero_points is kept and weight.has_offsets is not kept
    numbers = torch.from_numpy(q).float() - torch.tensor(zeros).repeat_interleave(32, 1)
    assert torch.equal(dequantize(weight, HALF).float().cpu(), numbers)


def test_int4_of_a_plain_checkpoint_has_zero_points_and_a_small_error() -> None:
    w = randn(N, K) + 0.3
    w[0] = 0
    weight = QUANTIZERS["int4"](w)
    assert isinstance(weight, GroupedWeight) and weight.has_zero_points
    written = dequantize(weight, HALF).float()
    assert torch.equal(written[0], w[0])
    steps = (w.unflatten(1, (-1, 128)).amax(2) - w.unflatten(1, (-1, 128)).amin(2)) / 15
    assert ((written - w).abs() <= 0.55 * spread(steps, K) + 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_instructions_subtract_zero_points(dtype: torch.dtype) -> None:
    large = 128 if dtype == torch.bfloat16 else 1024
    words = (0x12345678, 0x9ABCDEF0)
    q = torch.tensor([[word >> 4 * plane & 15 for word in words] for plane in range(8)])
    for points in ([3], [0, 16], [1, 5, 9, 15]):
        floats = torch.tensor([-float(large + point) for point in points]).to(dtype).view(torch.int16).tolist()
        doubled = tuple((bits & 0xFFFF) | (bits & 0xFFFF) << 16 for bits in floats)
        planes = torch.stack(execute(unpack._zero_points(dtype, len(points)), (*words, *doubled), 8, dtype))
        of_planes = torch.tensor(points).repeat_interleave(8 // len(points))
        assert torch.equal(planes.long(), q - of_planes[:, None])


# -- W8A8 -------------------------------------------------------------------------------------------------------------


def rows_in(dtype: torch.dtype, M: int, K: int = K) -> QuantizedRows:
    return QuantizedRows(*plain.quantize_tokens(randn(M, K, seed=3), dtype))


def int8_weight(N: int = N, K: int = K) -> ScaledWeight:
    q, scales = plain.quantize_tokens(randn(N, K, seed=1), torch.int8)
    return ScaledWeight(q, scales.flatten())


@pytest.mark.parametrize("M", [1, 17, 70])
@pytest.mark.parametrize("K", [64, 516])
def test_int8_on_both_sides_is_the_plain_definition(M: int, K: int) -> None:
    x, weight = rows_in(torch.int8, M, K), int8_weight(K=K)
    y = scaled_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(y, plain.w8a8_linear(*x, weight.q, weight.scales), rtol=1e-6, atol=1e-6)


def test_splits_and_tiles_of_int8_give_the_same_sums() -> None:
    x, weight = rows_in(torch.int8, 70), int8_weight()
    expected = plain.w8a8_linear(*x, weight.q, weight.scales)
    for config in (ScaledConfig(128, 128, 1, False, 8, 4), ScaledConfig(64, 64, 2, False, 4, 3)):
        y = scaled_kernel(x, weight, None, torch.float32, config)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it is cuBLAS that multiplies")
def test_many_rows_of_int8_are_left_to_cublas() -> None:
    x, weight = rows_in(torch.int8, MAX_INT8_KERNEL_ROWS + 1), int8_weight(9216)
    y = scaled_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(y, plain.w8a8_linear(*x, weight.q, weight.scales), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_for_int8_activations_gets_them() -> None:
    q = integers(-127, 128, N, K).cpu().numpy().astype(np.int8)
    scales = np.linspace(0.01, 0.02, N, dtype=np.float32)[:, None]
    tensor = int8_blocks("w", (N, K), lambda first, last: q[first:last], scales)
    assert tensor.type is Q8_F
    assert isinstance(load_quantized([tensor], torch.device(DEVICE)), GroupedWeight)  # W8A16
    made_for = replace(tensor, activations="int8")
    weight = load_quantized([made_for], torch.device(DEVICE))
    assert isinstance(weight, ScaledWeight) and weight.q.dtype == torch.int8
    assert torch.equal(weight.q.cpu(), torch.from_numpy(q)) and torch.equal(
        weight.scales.cpu(), torch.from_numpy(scales[:, 0])
    )
    in_groups = int8_blocks("w", (N, K), lambda first, last: q[first:last], np.hstack([scales, scales * 2]))
    assert isinstance(load_quantized([replace(in_groups, activations="int8")], torch.device(DEVICE)), GroupedWeight)


# -- W4A8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("M", [1, 40])
def test_four_bits_and_fp8_activations(group: int, M: int) -> None:
    q, scales = integers(0, 16, N, K), randn(N, K // group, seed=1).half()
    x, bias = rows_in(torch.float8_e4m3fn, M), randn(N, seed=4)
    y = w4a8_linear(x, pack_w4a8(q.to(torch.uint8), scales), bias, torch.float32)
    expected = plain.w4a8_linear(*x, q - 8, scales) + bias
    size = plain.w4a8_linear(x.q.float().abs().to(x.q.dtype), x.scales, (q - 8).abs(), scales.abs())
    assert ((y - expected).abs() <= (1e-3 if DEVICE == "cuda" else 1e-6) * size + 1e-6).all()  # 14-bit sums
    assert w4a8_linear(QuantizedRows(x.q[:0], x.scales[:0]), pack_w4a8(q.to(torch.uint8), scales)).shape == (0, N)


def test_splits_of_w4a8_are_added_up_in_one_order() -> None:
    q, scales = integers(0, 16, N, 4 * 256 + 64), randn(N, 17, seed=1).half()
    x, weight = rows_in(torch.float8_e4m3fn, 3, 4 * 256 + 64), pack_w4a8(q.to(torch.uint8), scales)
    shared, serial = (
        w4a8_kernel(x, weight, None, torch.float32, GroupedConfig(16, 64, 2, serial, 4, 3)) for serial in (False, True)
    )
    assert torch.equal(shared, serial)
    if DEVICE == "cuda":  # on the host sums differ with a tile's shape
        assert torch.equal(shared, w4a8_kernel(x, weight, None, torch.float32, GroupedConfig(128, 128, 2, True, 8, 3)))
    torch.testing.assert_close(shared, plain.w4a8_linear(*x, q - 8, scales), rtol=1e-2, atol=1e-2)


def test_the_instructions_make_every_value_in_every_plane() -> None:
    for first in range(16):
        values = [[(first + 3 * plane + 5 * word) % 16 for word in range(4)] for plane in range(8)]
        words = [0] * 4
        for plane, of_plane in enumerate(values):
            for word, value in enumerate(of_plane):
                words[plane // 2] |= value << 8 * word + 4 * (plane % 2)
        planes = execute(TO_FP8, tuple(words), 8, torch.bfloat16)
        as_fp8 = [plane.view(torch.uint8).view(torch.float8_e4m3fn).float() * UNIT for plane in planes]
        assert torch.equal(torch.stack(as_fp8), torch.tensor(values) - 8.0)


def test_w4a8_is_made_of_floats_and_of_symmetric_files() -> None:
    device = torch.device(DEVICE)
    floats = stored_floats("w", randn(N, K).cpu().numpy())
    assert floats.type is F32
    (made,) = load_segments([floats], torch.bfloat16, device, "w4a8")
    assert isinstance(made, W4A8Weight)
    q = integers(0, 16, N, K).cpu().numpy().astype(np.uint8)
    scales = np.ones((N, K // 128), np.float32)
    symmetric, shifted = (
        int4_blocks("w", (N, K), lambda first, last: q[first:last], scales, np.full_like(scales, zero))
        for zero in (8, 7)
    )
    assert isinstance(load_segments([symmetric], torch.bfloat16, device, "w4a8")[0], W4A8Weight)
    assert isinstance(load_segments([shifted], torch.bfloat16, device, "w4a8")[0], GroupedWeight)
    with pytest.raises(Unsupported, match="quantized already"):
        load_segments([symmetric], torch.bfloat16, device, "w8a8")
    experts = load_experts([[floats], [floats]], torch.bfloat16, device, "w4a8")
    assert not isinstance(experts, Tensor)  # 4 bits in groups, with 16-bit activations


@pytest.mark.parametrize(("group", "inputs"), [(128, 384), (128, 256 * 18), (256, 512)])
def test_one_row_of_w4a8_goes_without_tensor_cores(group: int, inputs: int) -> None:
    """Outputs that fill no program, values from the least to the greatest of fp8, and a group of zeros."""
    q, scales = integers(0, 16, N, inputs), randn(N, inputs // group, seed=1).half()
    values, sizes = randn(1, inputs, seed=2), integers(-9, 9, 1, inputs // 128, seed=3)
    values = (values.unflatten(1, (-1, 128)) * 2.0 ** sizes[..., None]).flatten(1).clamp(-448, 448)
    values[:, 128:256] = 0
    x = QuantizedRows(values.to(torch.float8_e4m3fn), torch.full((1, 1), 0.3, device=DEVICE))
    weight, bias = pack_w4a8(q.to(torch.uint8), scales), randn(N, seed=4)
    y = w4a8_gemv(x, weight.shuffled, bias, torch.float32)
    expected = plain.w4a8_linear(*x, q - 8, scales) + bias
    size = plain.w4a8_linear(x.q.float().abs().to(x.q.dtype), x.scales, (q - 8).abs(), scales.abs())
    assert ((y - expected).abs() <= 1e-4 * size + 1e-6).all()
    assert can_gemv_shuffled(weight.shuffled) and not can_gemv_shuffled(
        pack_w4a8(q.to(torch.uint8), randn(N, inputs // 64).half()).shuffled
    )

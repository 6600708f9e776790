"""GEMMs with 8 bits on both sides: interpreted where there is no GPU, else compiled."""

import pytest
import torch

from ops.gemms import DEVICE, HALF, assert_close, randn
from ops.quantized_cases import exact_codes, plain, scaled_case
from quire.ops.gpu.linear.quantize_rows import quantize_rows
from quire.ops.gpu.linear.scaled import ScaledConfig, ScaledWeight, scaled_kernel, scaled_linear

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("M", [1, 17])
def test_products_of_codes(dtype: torch.dtype, by_blocks: bool, M: int) -> None:
    x, weight = scaled_case(M, 150, 336, dtype, by_blocks)
    bias = randn(150, seed=3)
    y = scaled_linear(x, weight, bias, torch.float32)
    assert_close(y, *plain(x, weight), bias, tolerance=1e-3 if dtype == torch.float8_e4m3fn else 0)  # 14-bit sums


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_splits_of_products_of_codes(dtype: torch.dtype) -> None:
    x, weight = scaled_case(3, 70, 512, dtype, by_blocks=False)
    shared, serial = (
        scaled_kernel(x, weight, None, torch.float32, ScaledConfig(16, 64, 4, serial, 4, 3)) for serial in (False, True)
    )
    assert_close(shared, *plain(x, weight), tolerance=1e-3)
    assert torch.equal(shared, serial)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it is cuBLAS that multiplies")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("N", [96, 100])
def test_many_rows_of_codes(dtype: torch.dtype, N: int) -> None:
    x, weight = scaled_case(200, N, 336, dtype, by_blocks=False)
    bias = randn(N, seed=3)
    assert_close(scaled_linear(x, weight, bias), *plain(x, weight), bias, tolerance=1e-3)


def test_norms_and_products_meet() -> None:
    x, w = randn(3, 256).to(HALF), randn(40, 256, seed=1)
    weight = ScaledWeight(*exact_codes(w, torch.int8, 0))
    y = scaled_linear(quantize_rows(x, torch.int8), ScaledWeight(weight.q, weight.scales.flatten()), None, HALF)
    assert (y.float() - x.float() @ w.T).norm() < 0.02 * (x.float() @ w.T).norm()

"""Floats that are quantized while they are loaded, in C++: each value is the nearest one."""

import numpy as np
import pytest

from quire import _native
from quire.core.errors import Unsupported
from quire.ops.dequantize import NF4_VALUES, dequantize
from quire.ops.native import NativeOps
from quire.ops.tensors import BF16, STORAGE_TYPES, StoredTensor, stored_floats

ROWS, COLUMNS = 40, 96


def weights(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((ROWS, COLUMNS)) * rng.choice([1e-6, 0.02, 1, 300], (ROWS, 1))).astype(np.float32)


def quantized(w: np.ndarray, target: str) -> np.ndarray:
    data = _native.quantize("F32", w.view(np.uint8), w.shape[1], target)
    return dequantize(StoredTensor("w", w.shape, STORAGE_TYPES[target], data)).reshape(-1, 32)


def test_int8_is_within_half_a_step() -> None:
    w = weights().reshape(-1, 32)
    scale = (np.abs(w).max(1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    error = np.abs(quantized(weights(), "Q8_0") - w)
    # A scale that was rounded down leaves the largest weights short, by at most 127 times half of an fp16 step.
    assert np.all(error <= np.maximum(0.5 * scale, np.abs(w) * 2**-10) * (1 + 1e-5) + 127 * 2**-25)


def test_int4_is_within_half_a_step() -> None:
    w = weights().reshape(-1, 32)
    step = (w.max(1, keepdims=True) - w.min(1, keepdims=True)) / 15
    error = np.abs(quantized(weights(), "Q4_1") - w)
    rounding = 2**-10 * np.abs(w).max(1, keepdims=True) + 2**-20
    assert np.all(error <= 0.5 * step * (1 + 1e-3) + rounding)


def test_nf4_is_the_nearest_place() -> None:
    w = weights().reshape(-1, 32)
    largest = np.abs(w).max(1, keepdims=True)
    nearest = np.abs(w[..., None] - largest[..., None] * NF4_VALUES).min(2)
    np.testing.assert_allclose(np.abs(quantized(weights(), "NF4") - w), nearest, rtol=1e-5, atol=1e-6 * largest.max())


@pytest.mark.parametrize("target", ["Q8_0", "Q4_1", "NF4"])
def test_what_is_not_ordinary(target: str) -> None:
    w = np.zeros((4, 32), np.float32)
    w[1, 3], w[2, 3], w[3] = np.inf, np.nan, 0.25
    actual = quantized(w, target)
    np.testing.assert_array_equal(actual[0], 0)
    assert np.isnan(actual[1]).any() and np.isnan(actual[2]).any()
    np.testing.assert_allclose(actual[3], 0.25, rtol=2**-10)


def test_every_half_is_its_own_scale() -> None:
    fp16_values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    w = np.zeros((len(fp16_values), 32), np.float32)
    w[:, 0] = fp16_values * 127
    data = _native.quantize("F32", w.view(np.uint8), 32, "Q8_0")
    np.testing.assert_array_equal(data[:, :2].copy().view(np.float16)[:, 0].astype(np.float32), fp16_values)


def test_packing_quantizes_what_may_be_quantized() -> None:
    w = weights()
    rows = stored_floats("w", w)
    ops = NativeOps(threads=1, quantization="int4")
    assert [part.layout for part in ops.pack([rows, rows]).packed] == ["int4"]
    assert [part.layout for part in ops.pack([rows], keep=True).packed] == ["float32"]
    odd = stored_floats("odd", w[:, :40].copy())
    assert [part.layout for part in ops.pack([odd]).packed] == ["float32"]
    bfloat = np.ascontiguousarray(w.view(np.uint16)[:, 1::2]).view(np.uint8)
    (matrix,) = NativeOps(threads=1, quantization="int8").pack([StoredTensor("b", w.shape, BF16, bfloat)]).packed
    assert (matrix.layout, matrix.nbytes) == ("int8", 48 * COLUMNS * 8.5 / 8)


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(Unsupported, match="quantization `fp8` is not supported on a CPU"):
        NativeOps(quantization="fp8")
    q = StoredTensor("q", (2, 32), STORAGE_TYPES["Q8_0"], np.zeros((2, 34), np.uint8))
    with pytest.raises(Unsupported, match="q is quantized already, as Q8_0"):
        NativeOps(quantization="int8").pack([q])
    with pytest.raises(ValueError, match="'Q6_K' is not a type to quantize to"):
        _native.quantize("F32", np.zeros((1, 128), np.uint8), 32, "Q6_K")

"""Blocks of every GGUF type that is written, read by the gguf library and compared with its own."""

import gguf
import numpy as np
import pytest

from quire.ops.compiled import native
from quire.ops.dequantize import dequantize
from quire.quantize.gguf_grids import GRID_TYPES
from quire.quantize.gguf_plan import stored_as
from quire.quantize.gguf_ternary import TERNARY_TYPES
from quire.quantize.gguf_types import ENCODERS, bf16
from quire.quantize.search import offset_scales, symmetric_scales

# Root mean square of the error over that of the weights, normally distributed: a little above what was seen.
ERRORS = {
    "F32": 0, "F16": 3e-4, "BF16": 2e-3, "Q4_0": 0.088, "Q4_1": 0.08, "Q5_0": 0.044, "Q5_1": 0.039, "Q8_0": 0.0056,
    "IQ4_NL": 0.077, "MXFP4": 0.12, "Q2_K": 0.28, "Q3_K": 0.156, "Q4_K": 0.073, "Q5_K": 0.037, "Q6_K": 0.018,
    "IQ4_XS": 0.077, "IQ3_S": 0.15, "IQ3_XXS": 0.182, "IQ2_S": 0.26, "IQ2_XS": 0.29, "IQ2_XXS": 0.335,
    "IQ1_S": 0.47, "IQ1_M": 0.45, "TQ1_0": 0.5, "TQ2_0": 0.5,
}  # fmt: skip


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (8, 1024)).astype(np.float32)


def error(x: np.ndarray, y: np.ndarray, importance: np.ndarray | float = 1.0) -> float:
    return float(np.sqrt((importance * (x - y) ** 2).mean() / (importance * x**2).mean()))


@pytest.mark.parametrize("name", ENCODERS)
def test_the_library_reads_what_is_written_and_little_is_lost(name: str) -> None:
    x = weights()
    tensor = stored_as("w", x, name)
    ours = dequantize(tensor)
    if name != "F32":
        theirs = gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[name]).reshape(x.shape)
        assert np.array_equal(ours, theirs)
    assert error(x, ours) <= ERRORS[name]


@pytest.mark.parametrize("name", [name for name in ENCODERS if name.startswith(("Q", "IQ")) and name != "Q8_0"])
def test_importance_moves_the_error_to_inputs_that_matter_less(name: str) -> None:
    x = weights()
    importance = np.random.default_rng(1).exponential(size=1024).astype(np.float32) ** 2
    plain, weighted = (dequantize(stored_as("w", x, name, given)) for given in (None, importance))
    assert error(x, weighted, importance) < 0.95 * error(x, plain, importance)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_no_more_is_lost_than_by_the_library(name: str) -> None:
    x, kind = weights(2), gguf.GGMLQuantizationType[name]
    theirs = gguf.dequantize(gguf.quantize(x, kind), kind).reshape(x.shape)
    assert error(x, dequantize(stored_as("w", x, name))) <= 1.001 * error(x, theirs)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_blocks_are_those_of_quantizing_while_loading(name: str) -> None:
    x = weights(3)
    assert np.array_equal(stored_as("w", x, name).data, native.quantize("F32", x.view(np.uint8), 1024, name))


@pytest.mark.parametrize("name", ENCODERS)
def test_zeros_and_single_weights_stay_what_they_are(name: str) -> None:
    x = np.zeros((2, 256), np.float32)
    x[1, 7] = 1.0
    ours = dequantize(stored_as("w", x, name))
    assert not ours[0].any()
    near = (
        0.2 if name in GRID_TYPES or name in TERNARY_TYPES else 0.01
    )  # grids have no zeros: those beside it count too
    assert np.isclose(ours[1, 7], 1.0, rtol=near) and np.abs(ours[1]).argmax() == 7


def test_bf16_rounds_ties_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    assert bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_searched_scales_lose_less_than_the_whole_range() -> None:
    x = weights(4).reshape(-1, 32)
    counts = np.ones_like(x)
    scale = symmetric_scales(x, counts, 8)
    searched = np.clip(np.rint(x / scale), -8, 7) * scale
    widest = -x[np.arange(len(x)), np.abs(x).argmax(1)][:, None] / 8
    plain = np.clip(np.rint(x / widest), -8, 7) * widest
    assert ((searched - x) ** 2).sum() < 0.97 * ((plain - x) ** 2).sum()
    scale, offset = offset_scales(x, counts, 15, free=True)
    with_offset = np.clip(np.rint((x - offset) / scale), 0, 15) * scale + offset
    assert ((with_offset - x) ** 2).sum() < ((searched - x) ** 2).sum()


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_models_of_three_values_lose_nothing(name: str) -> None:
    x = (np.random.default_rng(5).integers(-1, 2, (4, 512)) * 0.375).astype(np.float32)
    tensor = stored_as("w", x, name)
    assert np.array_equal(dequantize(tensor), x)
    assert np.array_equal(tensor.data.reshape(-1), gguf.quantize(x, gguf.GGMLQuantizationType[name]).reshape(-1))

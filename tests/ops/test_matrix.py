"""Packed matrices: values against the gguf library, GEMMs against double precision."""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from ops.stored_blocks import FLOATS, LARGEST, stored_rows
from quire import _native
from quire.ops.dequantize import dequantize
from quire.ops.tensors import GGUF_TYPES, STORAGE_TYPES, StorageType, StoredTensor

QUANTIZED = [name for name in STORAGE_TYPES if name not in FLOATS]
HALF_SUMS = {"dotprod", "i8mm"}  # kernels that add up short runs of F16 weights in fp16
LAYOUTS = {  # layout, group, bits a weight
    "F32": ("float32", 0, 32),
    "F16": ("float16", 0, 16),
    "BF16": ("bfloat16", 0, 16),
    "Q4_0": ("int4", 32, 4.5),
    "Q4_1": ("int4", 32, 5),
    "Q4_K": ("int4", 32, 4.625),
    "IQ4_NL": ("codebook4", 32, 4.5),
    "IQ4_XS": ("codebook4", 32, 4.3125),
    "MXFP4": ("codebook4", 32, 4.5),
    "Q8_0": ("int8", 32, 8.5),
    "Q5_0": ("int5", 32, 5.5),
    "Q5_1": ("int5", 32, 6),
    "Q5_K": ("int5", 32, 5.625),
    "Q6_K": ("int6", 16, 6.5625),
    "Q3_K": ("int3", 16, 3.5625),
    "Q2_K": ("int2", 16, 3.125),
    "TQ1_0": ("int2", 32, 2.5),
    "TQ2_0": ("int2", 32, 2.5),
    "IQ1_S": ("codebook3", 32, 3.375),
    "IQ2_XXS": ("codebook3", 32, 3.375),
    "IQ3_XXS": ("codebook4", 32, 4.375),
    "IQ3_S": ("codebook4", 32, 4.375),
    "IQ1_M": ("codebook3", 16, 3.625),
    "IQ2_XS": ("codebook3", 16, 3.625),
    "IQ2_S": ("codebook3", 16, 3.625),
    "NVFP4": ("codebook4", 16, 5),
    "Q4_Z": ("int4", 32, 5),
    "Q4_F": ("int4", 32, 6),
    "Q8_F": ("int8", 32, 9),
    "Q8_M": ("int8", 32, 10),
    "NF4": ("codebook4", 32, 5),
    "FP4": ("codebook4", 32, 5),
    "F8_E4M3": ("bfloat16", 0, 16),
    "F8_E5M2": ("bfloat16", 0, 16),
    "FP8": ("bfloat16", 0, 16),
}
# Of a weight where scales are at most LARGEST: fp32 ones are kept to 22 bits, tables in 112ths and 120ths.
ROUNDED = {"Q4_F": 2**-17, "Q8_F": 2**-15, "Q8_M": 2**-14, "NF4": 0.004, "FP4": 0.0032, "FP8": 0, "Q4_Z": 0}


def oracle(type: StorageType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    if type.name not in GGUF_TYPES:
        columns = data.shape[1] // type.block_bytes * type.block
        return dequantize(StoredTensor("", (len(data), columns), type, data))
    return np.asarray(quants.dequantize(data, GGMLQuantizationType[type.name]), dtype=np.float32)


def assert_near(values: NDArray[np.float32], truth: NDArray[np.float32], name: str) -> None:
    """Of types that no layout holds to the bit. The zeros of Q4_Z may differ in their sign."""
    np.testing.assert_allclose(values, truth, rtol=2**-8 if name == "FP8" else 0, atol=LARGEST * ROUNDED[name])


def quantized_activations(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What integer layouts see of x: 8-bit values in groups of 32, ties to even, in the kernel's own fp32 steps."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    q = np.rint(groups * (np.float32(127) / largest)).astype(np.float64)
    seen: NDArray[np.float64] = q * (largest / np.float32(127))
    return seen.reshape(x.shape)


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    assert _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)


@pytest.mark.parametrize("name", STORAGE_TYPES)
def test_dequantize_has_the_bits_of_the_gguf_library(name: str) -> None:
    type = STORAGE_TYPES[name]
    data = stored_rows(type, 20, 512)
    values = _native.dequantize(name, data, 512)
    if name in ROUNDED:
        assert_near(values, oracle(type, data), name)
        return
    np.testing.assert_array_equal(values.view(np.uint32), oracle(type, data).view(np.uint32))


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q8_0", "Q4_K", "IQ4_XS"])
def test_every_half_dequantizes_as_numpy_says(name: str) -> None:
    fp16_values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    fp16_values = fp16_values[~np.isnan(fp16_values.view(np.float16))]
    type = STORAGE_TYPES[name]
    data = np.full((len(fp16_values), type.block_bytes), 0x17, dtype=np.uint8)
    data[:, :2] = fp16_values.view(np.uint8).reshape(-1, 2)
    expected = oracle(type, data)
    np.testing.assert_array_equal(_native.dequantize(name, data, type.block), expected)
    np.testing.assert_array_equal(_native.Matrix(name, [data], type.block).dequantized(), expected)


def test_every_exponent_of_mxfp4_is_kept() -> None:
    data = np.full((256, 17), 0x27, dtype=np.uint8)
    data[:, 0] = np.arange(256)
    with np.errstate(over="ignore"):
        expected = oracle(STORAGE_TYPES["MXFP4"], data).view(np.uint32)
    np.testing.assert_array_equal(_native.dequantize("MXFP4", data, 32).view(np.uint32), expected)
    np.testing.assert_array_equal(_native.Matrix("MXFP4", [data], 32).dequantized().view(np.uint32), expected)


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("name", STORAGE_TYPES)
def test_packing_keeps_every_value_exactly(name: str, rows: int) -> None:
    type = STORAGE_TYPES[name]
    data = stored_rows(type, rows, 512, seed=rows)
    matrix = _native.Matrix(name, [data], 512)
    layout, group, bits = LAYOUTS[name]
    assert (matrix.num_outputs, matrix.num_inputs, matrix.layout, matrix.group) == (rows, 512, layout, group)
    assert matrix.nbytes == -(-rows // 16) * 16 * 512 * bits / 8
    if name in ROUNDED:
        assert_near(matrix.dequantized(), oracle(type, data), name)
        return
    np.testing.assert_array_equal(matrix.dequantized().view(np.uint32), oracle(type, data).view(np.uint32))


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K"])
def test_row_order_permutes_outputs(name: str) -> None:
    data = stored_rows(STORAGE_TYPES[name], 40, 256)
    order = np.random.default_rng(1).permutation(40).astype(np.int32)
    permuted = _native.Matrix(name, [data], 256, order).dequantized()
    np.testing.assert_array_equal(permuted, _native.Matrix(name, [data], 256).dequantized()[order])


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_scales_and_offsets_make_the_values(name: str) -> None:
    data = stored_rows(STORAGE_TYPES[name], 20, 512)
    q, scales, offsets, table = _native.decode(name, data, 512)
    values = q.astype(np.float32) if table is None else np.array(table, np.float32)[q]
    group = 512 // scales.shape[1]
    actual = np.repeat(scales, group, axis=1) * values
    if offsets is not None:
        unit = np.repeat(scales, group, axis=1) if name == "Q4_Z" else np.float32(1)
        actual += np.repeat(offsets, group, axis=1) * unit
    np.testing.assert_array_equal(actual, _native.dequantize(name, data, 512))


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K"])
def test_columns_are_unpacked_in_the_order_of_inputs(name: str) -> None:
    data = stored_rows(STORAGE_TYPES[name], 40, 256)
    order = np.random.default_rng(1).permutation(256).astype(np.int32)
    permuted = _native.Matrix(name, [data], 256, None, order)
    np.testing.assert_array_equal(permuted.dequantized()[:, order], _native.Matrix(name, [data], 256).dequantized())
    with pytest.raises(ValueError, match="which only a tape supports"):
        _native.multiply(permuted, np.zeros((1, 256), np.float32))


@pytest.mark.parametrize(("rows", "outputs"), [(1, 33), (7, 100), (65, 48)])
@pytest.mark.parametrize("name", STORAGE_TYPES)
def test_multiply_is_near_double_precision(isa: str, name: str, rows: int, outputs: int) -> None:
    columns = 250 if STORAGE_TYPES[name].block == 1 else 512
    matrix = _native.Matrix(name, [stored_rows(STORAGE_TYPES[name], outputs, columns)], columns)
    x = np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32)
    weights = matrix.dequantized().astype(np.float64)
    seen = x.astype(np.float64) if name in FLOATS else quantized_activations(x)
    result = _native.multiply(matrix, x, 2)
    truth = x.astype(np.float64) @ weights.T
    if name == "F16" and isa in HALF_SUMS:  # 32 roundings to 11 bits, at random: a sixth of what 8-bit activations cost
        assert np.linalg.norm(result - truth) < 0.0015 * np.linalg.norm(truth)
        return
    # Errors are relative to what was added up, which may cancel; values and offsets are added up apart.
    magnitude = np.abs(seen) @ np.abs(weights).T + np.abs(seen).sum(1, keepdims=True) * np.abs(weights).max()
    assert np.all(np.abs(result - seen @ weights.T) <= 1e-6 * magnitude)
    if name in QUANTIZED:  # and 8-bit activations cost what they must: half a step in 127 of the largest, at random
        assert np.linalg.norm(result - truth) < 0.02 * np.linalg.norm(truth)


@pytest.mark.parametrize("name", STORAGE_TYPES)
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads_with_any_table(isa: str, name: str) -> None:
    matrix = _native.Matrix(name, [stored_rows(STORAGE_TYPES[name], 100, 768)], 768)
    x = np.random.default_rng(4).standard_normal((23, 768)).astype(np.float32)
    together = _native.multiply(matrix, x, 2)
    for r in range(len(x)):
        np.testing.assert_array_equal(_native.multiply(matrix, x[r : r + 1], 1 + r % 3)[0], together[r])
    if name == "F16" and isa in HALF_SUMS:
        return
    _native.use_isa("plain")
    np.testing.assert_array_equal(_native.multiply(matrix, x, 1), together)


@pytest.mark.parametrize(
    ("weight", "size"), [(255.0, 1e30), (60000.0, 1.0), (2.0**-14, 1e-30), (0.01, 3e38), (1.0, 1e-44)]
)
def test_halves_of_any_size_meet_activations_of_any_size(isa: str, weight: float, size: float) -> None:
    """All of one sign, so that sums are as large as they get: none overflows, and none is lost."""
    weights = np.full((3, 70), weight, dtype=np.float16)
    x = np.full((2, 70), size, dtype=np.float32)
    x[0, 1:] = 0
    result = _native.multiply(_native.Matrix("F16", [weights.view(np.uint8)], 70), x, 1)
    truth = x.astype(np.float64) @ weights.astype(np.float64).T
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(result, truth.astype(np.float32), rtol=0.002)


def test_zeros_and_tiny_activations_are_zero() -> None:
    matrix = _native.Matrix("Q4_1", [stored_rows(STORAGE_TYPES["Q4_1"], 16, 64)], 64)
    x = np.zeros((2, 64), dtype=np.float32)
    x[1] = 1e-40
    assert not _native.multiply(matrix, x, 1).any()


@pytest.mark.parametrize(
    ("storage", "shape", "columns", "order", "message"),
    [
        ("Q9_9", (4, 18), 32, None, "'Q9_9' is not a storage type"),
        ("Q4_0", (4, 18), 33, None, "33 columns are not a positive multiple of the block of Q4_0, 32"),
        ("Q4_0", (4, 20), 32, None, "a row of 32 columns of Q4_0 has 18 bytes, not 20"),
        ("Q4_0", (0, 18), 32, None, "a matrix of 0 rows"),
        ("Q4_0", (4, 18), 32, [0, 1, 2], "row_order has 3 entries for 4 rows"),
        ("Q4_0", (4, 18), 32, [0, 1, 2, 2], "row_order is not a permutation of 4 rows: entry 3 is 2"),
        ("Q4_0", (4, 18), 32, [0, 1, 2, 4], "row_order is not a permutation of 4 rows: entry 3 is 4"),
    ],
)
def test_bad_shapes_are_refused_with_the_numbers(
    storage: str, shape: tuple[int, int], columns: int, order: list[int] | None, message: str
) -> None:
    row_order = None if order is None else np.array(order, dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        _native.Matrix(storage, [np.zeros(shape, dtype=np.uint8)], columns, row_order)


def test_activations_must_fit_the_matrix() -> None:
    matrix = _native.Matrix("F32", [stored_rows(STORAGE_TYPES["F32"], 4, 8)], 8)
    with pytest.raises(ValueError, match="x has 9 columns for 8 inputs"):
        _native.multiply(matrix, np.zeros((1, 9), dtype=np.float32), 1)

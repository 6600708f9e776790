"""Every storage type, bit for bit as the library dequantizes it that defines it."""

import gguf
import numpy as np
import pytest
import torch

from quire.ops.dequantize import dequantize
from quire.ops.tensors import GGUF_TYPES, STORAGE_TYPES, StorageType, StoredTensor

SCALES_AT = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "NVFP4": (), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_M": (),
}  # fmt: skip


def random_blocks(kind: StorageType, rows: int, blocks: int) -> np.ndarray:
    """Any bits at all, except that no scale is infinite or not a number (those compare unequal to themselves)."""
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (rows * blocks, kind.block_bytes), dtype=np.uint8)
    if kind.name == "IQ1_M":  # the scale is in the top bits of four words
        data[:, 49::2] &= 0x0F
        scales = rng.normal(0, 0.01, len(data)).astype(np.float16).view(np.uint16)
        data[:, 49::2] |= (scales[:, None] >> np.array([0, 4, 8, 12]) & 15).astype(np.uint8) << 4
    for at in SCALES_AT.get(kind.name, (0, 2)):
        if kind.block > 1:
            data[:, at : at + 2] = rng.normal(0, 0.01, len(data)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, blocks * kind.block_bytes)


@pytest.mark.parametrize("kind", GGUF_TYPES.values(), ids=GGUF_TYPES)
def test_equals_the_gguf_library(kind: StorageType) -> None:
    data = random_blocks(kind, rows=5, blocks=6)
    ours = dequantize(StoredTensor("t", (5, 6 * kind.block), kind, data))
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.name])
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.astype(np.float32).reshape(ours.shape).view(np.uint32))


def test_every_exponent_of_mxfp4() -> None:
    data = np.full((256, 17), 0x27, np.uint8)  # codes 7 and 2: 6 and 1, doubled
    data[:, 0] = np.arange(256)
    ours = dequantize(StoredTensor("t", (256, 32), STORAGE_TYPES["MXFP4"], data))
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_every_float_of_eight_bits_is_torchs(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[name]
    theirs = torch.from_numpy(codes).view(dtype).float().numpy()
    np.testing.assert_array_equal(dequantize(StoredTensor("t", (1, 256), STORAGE_TYPES[name], codes)), theirs)


def test_rows_come_in_the_tensors_order() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    order = np.array([2, 0, 3, 1], np.int32)
    tensor = StoredTensor("t", (2, 2, 3), STORAGE_TYPES["F32"], values.view(np.uint8), order)
    np.testing.assert_array_equal(dequantize(tensor), values[order])


def test_data_that_is_a_strided_view() -> None:
    wide = random_blocks(STORAGE_TYPES["Q8_0"], rows=4, blocks=4)
    half = wide[:, : 2 * 34]
    whole = dequantize(StoredTensor("t", (4, 128), STORAGE_TYPES["Q8_0"], wide))
    np.testing.assert_array_equal(dequantize(StoredTensor("t", (4, 64), STORAGE_TYPES["Q8_0"], half)), whole[:, :64])

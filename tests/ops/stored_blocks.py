"""Random rows of every type that a matrix is stored in."""

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StorageType

FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "FP8")
LARGEST = 0.02  # scale
# Where a block keeps its fp16 scale and offset. All other bytes of a block may be anything.
SCALE_PLACES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),  # an exponent, in one byte
    "NVFP4": (),  # four scales of a byte
    "IQ1_M": (),  # a scale in the top bits of four words
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
WIDE_SCALES = {"Q4_F": 2, "Q8_F": 1, "Q8_M": 2, "NF4": 1, "FP4": 1, "FP8": 1}  # fp32 numbers that blocks begin with


def stored_rows(type: StorageType, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [rows, row_bytes] with every value that the type has, and scales of both signs."""
    rng = np.random.default_rng(seed)
    if type.name in WIDE_SCALES:
        blocks = rng.integers(0, 120, (rows, columns // type.block, type.block_bytes), dtype=np.uint8)
        scales = rng.uniform(-LARGEST, LARGEST, (*blocks.shape[:2], WIDE_SCALES[type.name])).astype(np.float32)
        blocks[:, :, : scales.shape[2] * 4] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)
    if type.name.startswith("F8_"):
        return rng.integers(0, 120, (rows, columns), dtype=np.uint8)
    if type.name in FLOATS:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        if type.name == "BF16":
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.astype(np.float16 if type.name == "F16" else np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, columns // type.block, type.block_bytes), dtype=np.uint8)
    for place in SCALE_PLACES.get(type.name, (0,)):
        scales = rng.uniform(-LARGEST, LARGEST, (rows, columns // type.block, 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = scales.view(np.uint8)
    if type.name == "MXFP4":
        blocks[:, :, 0] = rng.integers(118, 126, blocks.shape[:2])
    if type.name == "Q4_Z":
        blocks[:, :, 2:4] = rng.integers(0, 17, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    if type.name == "NVFP4":
        blocks[:, :, :4] &= 0x3F
    if type.name == "IQ1_M":
        blocks[:, :, 49::2] = blocks[:, :, 49::2] & 0x0F | 0x20
    return blocks.reshape(rows, -1)

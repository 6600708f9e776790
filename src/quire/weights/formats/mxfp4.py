"""MXFP4 as gpt-oss stores its experts: e2m1 values in blocks of 32 with a scale that is a power of two.

    X_blocks  uint8 [experts, N, K / 32, 16]   value 2i of a block in the low nibble of byte i, 2i + 1 in the high
    X_scales  uint8 [experts, N, K / 32]       the exponent of the scale, plus 127
    X_bias    floats [experts, N]

Every expert becomes a linear layer: `mlp.experts.down_proj_blocks` holds `mlp.experts.3.down_proj.weight`."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import MXFP4, StoredTensor, stored_floats
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, modules_with
from quire.weights.raw import RawTensors

BLOCK_SIZE, BLOCK_BYTES = 32, 16


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    derived = {}
    for module in modules_with(raw, "_blocks"):
        blocks, scales, bias = f"{module}_blocks", f"{module}_scales", f"{module}_bias"
        shape = raw.shape(blocks)
        if len(shape) != 4 or shape[3] != BLOCK_BYTES:
            raise raw.bad(blocks, f"is {[*shape]}, not blocks of {BLOCK_BYTES} bytes in rows of experts")
        raw.expect_shape(scales, *shape[:3])
        experts, outputs, inputs = shape[0], shape[1], shape[2] * BLOCK_SIZE
        layers, _, name = module.rpartition(".")
        for expert in range(experts):
            weight = partial(_weight, raw, blocks, scales, expert)
            derived[f"{layers}.{expert}.{name}.weight"] = DerivedTensor((outputs, inputs), (blocks, scales), weight)
            if bias in raw:
                raw.expect_shape(bias, experts, outputs)
                derived[f"{layers}.{expert}.{name}.bias"] = DerivedTensor(
                    (outputs,), (bias,), partial(_bias, raw, bias, expert)
                )
    return derived


def _weight(raw: RawTensors, blocks: str, scales: str, expert: int) -> StoredTensor:
    return mxfp4_tensor(blocks.removesuffix("_blocks"), raw.integers(blocks)[expert], raw.integers(scales)[expert])


def mxfp4_tensor(name: str, pairs: NDArray[np.uint8], scales: NDArray[np.uint8]) -> StoredTensor:
    """Blocks as GGUF has them: the scale, then the first 16 values in the low nibbles and the others in the high.
    `pairs` [N, K / 32, 16], `scales` [N, K / 32]"""
    outputs, num_blocks, _ = pairs.shape
    values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(outputs, num_blocks, 2, BLOCK_BYTES)
    rows = np.empty((outputs, num_blocks, 1 + BLOCK_BYTES), np.uint8)
    rows[..., 0] = scales
    rows[..., 1:] = values[:, :, 0] | values[:, :, 1] << 4
    return StoredTensor(name, (outputs, num_blocks * BLOCK_SIZE), MXFP4, rows.reshape(outputs, -1))


def _bias(raw: RawTensors, bias: str, expert: int) -> StoredTensor:
    return stored_floats(bias, raw.floats(bias)[expert])

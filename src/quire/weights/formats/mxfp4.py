"""MXFP4 as gpt-oss stores its experts: floats of 4 bits, 32 of them with a power of two.

    X_blocks  uint8 [experts, N, K / 32, 16]   number 2i of a block in the lower half of byte i, 2i + 1 in the upper
    X_scales  uint8 [experts, N, K / 32]       the exponent of two, plus 127
    X_bias    floats [experts, N]

Every expert becomes a linear layer: `mlp.experts.down_proj_blocks` holds `mlp.experts.3.down_proj.weight`."""

from functools import partial

import numpy as np

from quire.ops.tensors import MXFP4, StoredTensor, stored_floats
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import MadeTensor, modules_with
from quire.weights.raw import RawTensors

BLOCK, HALF = 32, 16


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, MadeTensor]:
    made = {}
    for module in modules_with(raw, "_blocks"):
        blocks, scales, bias = f"{module}_blocks", f"{module}_scales", f"{module}_bias"
        shape = raw.shape(blocks)
        if len(shape) != 4 or shape[3] != HALF:
            raise raw.bad(blocks, f"is {[*shape]}, not blocks of {HALF} bytes in rows of experts")
        raw.expect_shape(scales, *shape[:3])
        experts, outputs, inputs = shape[0], shape[1], shape[2] * BLOCK
        layers, _, name = module.rpartition(".")
        for expert in range(experts):
            weight = partial(_weight, raw, blocks, scales, expert)
            made[f"{layers}.{expert}.{name}.weight"] = MadeTensor((outputs, inputs), (blocks, scales), weight)
            if bias in raw:
                raw.expect_shape(bias, experts, outputs)
                made[f"{layers}.{expert}.{name}.bias"] = MadeTensor(
                    (outputs,), (bias,), partial(_bias, raw, bias, expert)
                )
    return made


def _weight(raw: RawTensors, blocks: str, scales: str, expert: int) -> StoredTensor:
    """The bytes of a block as GGUF has them: the scale, then the first half in the lower halves of bytes."""
    pairs = raw.integers(blocks)[expert]
    outputs, num_blocks, _ = pairs.shape
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(outputs, num_blocks, 2, HALF)
    rows = np.empty((outputs, num_blocks, 1 + HALF), np.uint8)
    rows[..., 0] = raw.integers(scales)[expert]
    rows[..., 1:] = codes[:, :, 0] | codes[:, :, 1] << 4
    name = blocks.removesuffix("_blocks")
    return StoredTensor(name, (outputs, num_blocks * BLOCK), MXFP4, rows.reshape(outputs, -1))


def _bias(raw: RawTensors, bias: str, expert: int) -> StoredTensor:
    return stored_floats(bias, raw.floats(bias)[expert])

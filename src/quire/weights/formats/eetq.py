"""EETQ, as transformers writes it: 8 bits with a scale an output, w = scale * (code - 128).

    X.weight         int8 [K, N]    codes in the order in which the kernels of Turing and later read them
    X.weight_scales  [N]

The shape is only that of the layer: the bytes are those of two outputs at a time, of 64 inputs each in turn. Of 16
inputs, a byte's place has the inputs' bits 2, 1, 0, 3, from the highest on. A file does not say which GPU it was made
for; Volta's order is another, and would be read as noise."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.ops.tensors import StoredTensor
from quire.weights.blocks import eight_bits
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import MadeTensor, modules_with, parts_of
from quire.weights.raw import RawTensors

TILE = 64  # inputs of one output that lie together; outputs come in multiples of it too


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, MadeTensor]:
    quantization.expect("weights", None, "int8")
    quantization.expect("bits", None, 8)
    if fused := next(modules_with(raw, ".qweight"), None):
        raise Unsupported(
            f"{raw.path}: {fused}.qweight is as EETQ's own tool writes it, cut out of layers that were packed together",
            "what transformers writes is read: `EetqConfig`, or `--quantization int8` with the plain checkpoint",
        )
    return {f"{module}.weight": _linear(raw, module) for module in modules_with(raw, ".weight_scales")}


def _linear(raw: RawTensors, module: str) -> MadeTensor:
    name = f"{module}.weight"
    shape = raw.shape(name)
    if raw.dtype(name) != "I8" or len(shape) != 2 or shape[0] % TILE or shape[1] % TILE:
        raise raw.bad(name, f"is {raw.dtype(name)} {[*shape]}, and a matrix of I8 in multiples of {TILE} is expected")
    inputs, outputs = shape
    raw.expect_shape(f"{module}.weight_scales", outputs)
    parts = parts_of(raw, module, (".weight", ".weight_scales"))
    return MadeTensor((outputs, inputs), parts, partial(_make, raw, module, (outputs, inputs)))


def _make(raw: RawTensors, module: str, shape: tuple[int, int]) -> StoredTensor:
    outputs, inputs = shape
    # [pairs of outputs, tiles, 2, sixteens of a tile, bits 2 and 1 of an input, bit 0, bit 3]
    stored = raw.integers(f"{module}.weight").view(np.uint8).reshape(outputs // 2, inputs // TILE, 2, 4, 4, 2, 2)

    def codes(first: int, last: int) -> NDArray[np.int8]:  # first and last are multiples of 32, or the end
        in_order = stored[first // 2 : last // 2].transpose(0, 2, 1, 3, 6, 4, 5).reshape(last - first, inputs)
        return np.bitwise_xor(in_order, 128, dtype=np.uint8).view(np.int8)

    return eight_bits(f"{module}.weight", shape, codes, raw.floats(f"{module}.weight_scales")[:, None])

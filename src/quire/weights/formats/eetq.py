"""EETQ, as transformers writes it: 8 bits with a scale for each output, w = scale * (q - 128).

    X.weight         int8 [K, N]    in the order in which the kernels for Turing and later read it
    X.weight_scales  [N]

The shape is that of the layer, not of the bytes: those are tiles of 64 inputs, of two outputs in turn. Within 16
inputs, the index of a byte is the input's index with its bits in the order 2, 1, 0, 3, from the highest. A file does
not tell which GPU it was written for; Volta's order differs, and would be read as noise."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.ops.tensors import StoredTensor
from quire.weights.blocks import int8_blocks
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with
from quire.weights.raw import RawTensors

TILE = 64  # inputs of one output that lie together; the number of outputs is a multiple of it too


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    quantization.expect("weights", None, "int8")
    quantization.expect("bits", None, 8)
    if fused := next(modules_with(raw, ".qweight"), None):
        raise Unsupported(
            f"{raw.path}: {fused}.qweight is in the layout of EETQ's own tool, cut out of layers packed together",
            "use a checkpoint of transformers (`EetqConfig`), or `--quantization int8` with the plain checkpoint",
        )
    return {f"{module}.weight": _linear(raw, module) for module in modules_with(raw, ".weight_scales")}


def _linear(raw: RawTensors, module: str) -> DerivedTensor:
    name = f"{module}.weight"
    shape = raw.shape(name)
    if raw.dtype(name) != "I8" or len(shape) != 2 or shape[0] % TILE or shape[1] % TILE:
        raise raw.bad(name, f"is {raw.dtype(name)} {[*shape]}, and a matrix of I8 in multiples of {TILE} is expected")
    inputs, outputs = shape
    raw.expect_shape(f"{module}.weight_scales", outputs)
    sources = module_tensors(raw, module, (".weight", ".weight_scales"))
    return DerivedTensor((outputs, inputs), sources, partial(_derive, raw, module, (outputs, inputs)))


def _derive(raw: RawTensors, module: str, shape: tuple[int, int]) -> StoredTensor:
    outputs, inputs = shape
    # [pairs of outputs, tiles, 2, sixteens of a tile, bits 2 and 1 of an input, bit 0, bit 3]
    stored = raw.integers(f"{module}.weight").view(np.uint8).reshape(outputs // 2, inputs // TILE, 2, 4, 4, 2, 2)

    def quantized(first: int, last: int) -> NDArray[np.int8]:  # first and last are multiples of 32, or the end
        in_order = stored[first // 2 : last // 2].transpose(0, 2, 1, 3, 6, 4, 5).reshape(last - first, inputs)
        return np.bitwise_xor(in_order, 128, dtype=np.uint8).view(np.int8)

    return int8_blocks(f"{module}.weight", shape, quantized, raw.floats(f"{module}.weight_scales")[:, None])

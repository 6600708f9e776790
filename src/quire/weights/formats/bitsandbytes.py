"""bitsandbytes: LLM.int8(), NF4 and FP4.

    X.weight int8 [N, K], X.SCB fp32 [N]            w = q * SCB / 127

    X.weight uint8 [N * K / 2, 1]                   two indices into a codebook a byte, the first in the high nibble
    X.weight.quant_state.bitsandbytes__nf4          JSON in bytes: quant_type, blocksize, shape, nested_blocksize, ...
    X.weight.quant_map fp32 [16]                    the codebook
    X.weight.absmax fp32 [N * K / blocksize]        the largest magnitude of a block; blocks cross the ends of rows
      or uint8, with X.weight.nested_absmax and X.weight.nested_quant_map [256]:
                                                    nested_quant_map[q] * nested_absmax + nested_offset

The weights of LLM.int8() are plain int8. Activations of at least `llm_int8_threshold`, the outliers, are not quantized
with the others: on a CPU, where activations are quantized, Quire multiplies outliers in fp32, token by token
(docs/decisions/007-outliers-apart-by-token.md). On a GPU activations stay 16-bit, and the threshold has no effect."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import FP4_VALUES, NF4_VALUES
from quire.ops.tensors import FP4, NF4, StorageType, StoredTensor
from quire.weights.blocks import BLOCK_SIZE, codebook_blocks, fits_blocks, int8_blocks
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with, plain_floats
from quire.weights.raw import RawTensors

STATE = ".weight.quant_state.bitsandbytes__"
CODEBOOKS: dict[str, tuple[StorageType, NDArray[np.float32]]] = {"nf4": (NF4, NF4_VALUES), "fp4": (FP4, FP4_VALUES)}
OTHER_TENSORS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
MAX_STATE_BYTES = 1 << 16
DEFAULT_THRESHOLD = 6.0


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    derived = {}
    for kind in CODEBOOKS:
        for module in modules_with(raw, STATE + kind):
            derived[f"{module}.weight"] = _four_bits(raw, module, kind)
    for module in modules_with(raw, ".SCB"):
        derived[f"{module}.weight"] = _eight_bits(raw, module, _threshold(quantization))
    return derived


# -- LLM.int8() --------------------------------------------------------------------------------------------------------


def _threshold(quantization: CheckpointConfig) -> float:
    """0: no activation is an outlier."""
    if (threshold := quantization.float("llm_int8_threshold", DEFAULT_THRESHOLD)) < 0:
        raise BadCheckpoint(f"{quantization.source}: llm_int8_threshold is {threshold}, and it must be at least 0")
    return threshold


def _eight_bits(raw: RawTensors, module: str, threshold: float) -> DerivedTensor:
    name = f"{module}.weight"
    if len(shape := raw.shape(name)) != 2:
        raise raw.bad(name, f"is {[*shape]}, and a matrix is expected")
    raw.expect_shape(f"{module}.SCB", shape[0])
    if (order := f"{module}.weight_format") in raw and (stored := raw.integers(order).flat[0]) != 0:
        raise Unsupported(f"{raw.path}: {order} is {stored}", "only row-major weights (0) are read")
    sources = module_tensors(raw, module, (".weight", ".SCB", ".weight_format"))
    outputs, inputs = shape
    return DerivedTensor(shape, sources, partial(_derive_eight_bits, raw, module, (outputs, inputs), threshold))


def _derive_eight_bits(raw: RawTensors, module: str, shape: tuple[int, int], threshold: float) -> StoredTensor:
    values = raw.integers(f"{module}.weight")
    scales = (raw.floats(f"{module}.SCB") / np.float32(127))[:, None]
    if not fits_blocks(shape[1], shape[1]):
        return plain_floats(f"{module}.weight", values * scales)
    blocks = int8_blocks(f"{module}.weight", shape, lambda first, last: values[first:last], scales)
    return replace(blocks, threshold=threshold)


# -- NF4 and FP4 -------------------------------------------------------------------------------------------------------


def _four_bits(raw: RawTensors, module: str, kind: str) -> DerivedTensor:
    name, stored = f"{module}.weight", f"{module}{STATE}{kind}"
    state = _state(raw, stored)
    shape = state.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
        raise raw.bad(stored, f"gives the shape {shape!r}, and a matrix is expected")
    outputs, inputs = shape
    count, blocksize = outputs * inputs, state.get("blocksize")
    if type(blocksize) is not int or blocksize <= 0 or raw.nbytes(name) * 2 != count + count % 2:
        raise raw.bad(name, f"has {raw.nbytes(name)} bytes, for {shape} in blocks of {blocksize}")
    raw.expect_shape(f"{name}.absmax", -(-count // blocksize))
    raw.expect_shape(f"{name}.quant_map", 16)
    if not np.array_equal(raw.floats(f"{name}.quant_map"), CODEBOOKS[kind][1]):
        raise Unsupported(
            f"{raw.path}: {name}.quant_map is not the codebook of {kind}", "only the library's own codebooks are read"
        )
    sources = (name, stored, *module_tensors(raw, name, OTHER_TENSORS))
    return DerivedTensor((outputs, inputs), sources, partial(_derive_four_bits, raw, name, kind, state))


def _state(raw: RawTensors, name: str) -> dict[str, Any]:
    if raw.nbytes(name) > MAX_STATE_BYTES:
        raise raw.bad(name, f"has {raw.nbytes(name)} bytes, and {MAX_STATE_BYTES} are allowed")
    try:
        state = json.loads(raw.integers(name).tobytes())
    except (ValueError, RecursionError) as error:
        raise raw.bad(name, f"is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise raw.bad(name, "is not a JSON object")
    return state


def _derive_four_bits(raw: RawTensors, name: str, kind: str, state: dict[str, Any]) -> StoredTensor:
    (outputs, inputs), blocksize = state["shape"], state["blocksize"]
    packed = raw.integers(name).reshape(-1)
    absmax = _absmax(raw, name, state)
    storage, codebook = CODEBOOKS[kind]
    if blocksize % BLOCK_SIZE or inputs % BLOCK_SIZE:
        indices = np.stack((packed >> 4, packed & 15), axis=1).reshape(-1)[: outputs * inputs]
        values = codebook[indices] * np.repeat(absmax, blocksize)[: len(indices)]
        return plain_floats(name, values.reshape(outputs, inputs))
    scales = np.repeat(absmax, blocksize // BLOCK_SIZE)[: outputs * inputs // BLOCK_SIZE].reshape(outputs, -1)
    rows = packed.reshape(outputs, -1)

    def quantized(first: int, last: int) -> NDArray[np.uint8]:
        pairs = rows[first:last]
        return np.stack((pairs >> 4, pairs & 15), axis=2).reshape(last - first, inputs)

    return codebook_blocks(name, (outputs, inputs), storage, quantized, scales)


def _absmax(raw: RawTensors, name: str, state: dict[str, Any]) -> NDArray[np.float32]:
    if f"{name}.nested_absmax" not in raw:
        return raw.floats(f"{name}.absmax")
    indices, blocksize = raw.integers(f"{name}.absmax"), state.get("nested_blocksize")
    if type(blocksize) is not int or blocksize <= 0:
        raise raw.bad(f"{name}.absmax", f"has a nested_blocksize of {blocksize!r}")
    raw.expect_shape(f"{name}.nested_absmax", -(-len(indices) // blocksize))
    raw.expect_shape(f"{name}.nested_quant_map", 256)
    largest = np.repeat(raw.floats(f"{name}.nested_absmax"), blocksize)[: len(indices)]
    codebook = raw.floats(f"{name}.nested_quant_map")
    absmax: NDArray[np.float32] = codebook[indices] * largest + np.float32(state.get("nested_offset", 0))
    return absmax

"""HQQ: 1 to 8 bits in groups of inputs, with fractional zero points.

    X.W_q           uint8 [rows / (8 / bits), group]; of 3 bits, int32 [rows / 10, group], rounded up
    X.scale, .zero  floats [rows, 1]        rows: the groups of output 0, of output 1, ...
    X.shape         [outputs, inputs], and other settings of the quantizer

w = scale * (q - zero). A word has values of rows that lie far apart: of 4 bits, the high nibbles are the first half
of all rows. With `axis` 0 the axes are exchanged: W_q [group / (8 / bits), columns], and scale and zero [1, columns],
of a weight that was reshaped to [group, columns]. Neighbours then have scales of their own: the weight becomes fp16."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.ops.tensors import F16, StoredTensor
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with
from quire.weights.formats.grouped import grouped_integers
from quire.weights.raw import RawTensors

BITS = (1, 2, 3, 4, 8)
METADATA = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip
SUPPORTED_VALUES = {"view_as_float": 0, "quant_scale": 0, "quant_zero": 0}


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    return {f"{module}.weight": _linear(raw, module) for module in modules_with(raw, ".W_q")}


def _linear(raw: RawTensors, module: str) -> DerivedTensor:
    for key, value in SUPPORTED_VALUES.items():
        if f"{module}.{key}" in raw and (stored := int(raw.integers(f"{module}.{key}")[0])) != value:
            raise Unsupported(f"{raw.path}: {module}.{key} is {stored}", f"supported: {value}")
    bits = int(raw.integers(f"{module}.nbits")[0])
    if bits not in BITS:
        raise raw.bad(f"{module}.nbits", f"is {bits}, and HQQ has {', '.join(map(str, BITS))}")
    raw.expect_shape(f"{module}.shape", 2)
    outputs, inputs = (int(size) for size in raw.integers(f"{module}.shape"))
    words, rows = raw.shape(f"{module}.W_q"), raw.shape(f"{module}.scale")[0]
    raw.expect_shape(f"{module}.zero", *raw.shape(f"{module}.scale"))
    values_a_word = 10 if bits == 3 else 8 // bits
    sources = module_tensors(raw, module, (".W_q", ".scale", ".zero", *(f".{key}" for key in METADATA)))
    if f"{module}.axis" in raw and int(raw.integers(f"{module}.axis")[0]) == 0:
        columns = raw.shape(f"{module}.scale")[-1]
        if rows != 1 or columns < 1 or outputs * inputs % columns:
            raise raw.bad(f"{module}.scale", f"is {[rows, columns]}, and the weight is {[outputs, inputs]}")
        group = outputs * inputs // columns
        if words != (-(-group // values_a_word), columns):
            raise raw.bad(f"{module}.W_q", f"is {[*words]}, and does not hold {group} rows of {columns}")
        return DerivedTensor(
            (outputs, inputs), sources, partial(_derive_floats, raw, module, bits, (outputs, inputs), group)
        )
    if outputs < 1 or rows % outputs or inputs % (rows // outputs):
        raise raw.bad(f"{module}.scale", f"has {rows} scales, and the weight is {[outputs, inputs]}")
    if words != (-(-rows // values_a_word), inputs // (rows // outputs)):
        raise raw.bad(f"{module}.W_q", f"is {[*words]}, and does not hold {[outputs, inputs]} in {rows} groups")
    return DerivedTensor((outputs, inputs), sources, partial(_derive, raw, module, bits, (outputs, inputs)))


def _derive(raw: RawTensors, module: str, bits: int, shape: tuple[int, int]) -> StoredTensor:
    outputs, inputs = shape
    words = raw.integers(f"{module}.W_q")
    scales, zeros = (raw.floats(f"{module}.{x}").reshape(outputs, -1) for x in ("scale", "zero"))
    groups = scales.shape[1]

    def quantized(first: int, last: int) -> NDArray[np.uint8]:
        return _unpacked(words, bits, first * groups, last * groups).reshape(last - first, inputs)

    # A fractional zero point cannot be subtracted from integers, so fewer bits become 4 bits with that zero point.
    return grouped_integers(f"{module}.weight", shape, max(bits, 4), quantized, scales, zeros)


def _derive_floats(raw: RawTensors, module: str, bits: int, shape: tuple[int, int], group: int) -> StoredTensor:
    words = raw.integers(f"{module}.W_q")
    scales, zeros = (raw.floats(f"{module}.{x}").reshape(1, -1) for x in ("scale", "zero"))
    weight = np.empty((group, words.shape[1]), np.float16)
    for row in range(group):  # row by row: the whole weight in fp32 would take twice the memory
        weight[row] = scales[0] * (_unpacked(words, bits, row, row + 1)[0] - zeros[0])
    return StoredTensor(f"{module}.weight", shape, F16, weight.reshape(shape).view(np.uint8))


def _unpacked(words: NDArray[Any], bits: int, first: int, last: int) -> NDArray[np.uint8]:
    """The values of some rows, [last - first, columns of the words]."""
    rows = np.arange(first, last)
    shifts = ((27 if bits == 3 else 8 - bits) - bits * (rows // len(words))).astype(words.dtype)
    values: NDArray[np.uint8] = (words[rows % len(words)] >> shifts[:, None] & ((1 << bits) - 1)).astype(np.uint8)
    return values

"""HQQ: codes of 1 to 8 bits in groups of inputs, with zero points that are fractions.

    X.W_q           uint8 [rows / (8 / bits), group]; of 3 bits, int32 [rows / 10, group], rounded up
    X.scale, .zero  floats [rows, 1]        rows: the groups of output 0, of output 1, ...
    X.shape         [outputs, inputs], and other numbers that say how it was made

w = scale * (code - zero). A word has the codes of rows that lie far apart: of 4 bits, the upper halves of words are the
first half of all rows. With `axis` 0 all of that is turned: W_q [group / (8 / bits), columns], and scale and zero
[1, columns], of a weight whose numbers, taken in order, fill `group` such rows. Neighbours have scales of their own
then, and the weight becomes floats of 16 bits."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.ops.tensors import F16, StoredTensor
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import MadeTensor, modules_with, parts_of
from quire.weights.formats.grouped import grouped_integers
from quire.weights.raw import RawTensors

BITS = (1, 2, 3, 4, 8)
SAID = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip
ONLY = {"view_as_float": 0, "quant_scale": 0, "quant_zero": 0}  # nobody wrote code for other values


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, MadeTensor]:
    return {f"{module}.weight": _linear(raw, module) for module in modules_with(raw, ".W_q")}


def _linear(raw: RawTensors, module: str) -> MadeTensor:
    for key, value in ONLY.items():
        if f"{module}.{key}" in raw and (found := int(raw.integers(f"{module}.{key}")[0])) != value:
            raise Unsupported(f"{raw.path}: {module}.{key} is {found}", f"supported: {value}")
    bits = int(raw.integers(f"{module}.nbits")[0])
    if bits not in BITS:
        raise raw.bad(f"{module}.nbits", f"is {bits}, and HQQ has {', '.join(map(str, BITS))}")
    raw.expect_shape(f"{module}.shape", 2)
    outputs, inputs = (int(size) for size in raw.integers(f"{module}.shape"))
    words, rows = raw.shape(f"{module}.W_q"), raw.shape(f"{module}.scale")[0]
    raw.expect_shape(f"{module}.zero", *raw.shape(f"{module}.scale"))
    a_word = 10 if bits == 3 else 8 // bits
    parts = parts_of(raw, module, (".W_q", ".scale", ".zero", *(f".{key}" for key in SAID)))
    if f"{module}.axis" in raw and int(raw.integers(f"{module}.axis")[0]) == 0:
        columns = raw.shape(f"{module}.scale")[-1]
        if rows != 1 or columns < 1 or outputs * inputs % columns:
            raise raw.bad(f"{module}.scale", f"is {[rows, columns]}, and the weight is {[outputs, inputs]}")
        group = outputs * inputs // columns
        if words != (-(-group // a_word), columns):
            raise raw.bad(f"{module}.W_q", f"is {[*words]}, and does not hold {group} rows of {columns}")
        return MadeTensor((outputs, inputs), parts, partial(_make_floats, raw, module, bits, (outputs, inputs), group))
    if outputs < 1 or rows % outputs or inputs % (rows // outputs):
        raise raw.bad(f"{module}.scale", f"has {rows} scales, and the weight is {[outputs, inputs]}")
    if words != (-(-rows // a_word), inputs // (rows // outputs)):
        raise raw.bad(f"{module}.W_q", f"is {[*words]}, and does not hold {[outputs, inputs]} in {rows} groups")
    return MadeTensor((outputs, inputs), parts, partial(_make, raw, module, bits, (outputs, inputs)))


def _make(raw: RawTensors, module: str, bits: int, shape: tuple[int, int]) -> StoredTensor:
    outputs, inputs = shape
    words = raw.integers(f"{module}.W_q")
    scales, zeros = (raw.floats(f"{module}.{x}").reshape(outputs, -1) for x in ("scale", "zero"))
    groups = scales.shape[1]

    def codes(first: int, last: int) -> NDArray[np.uint8]:
        return _codes(words, bits, first * groups, last * groups).reshape(last - first, inputs)

    # A zero that is a fraction cannot be taken off the codes of fewer bits: they are codes of 4 bits as they are.
    return grouped_integers(f"{module}.weight", shape, max(bits, 4), codes, scales, zeros)


def _make_floats(raw: RawTensors, module: str, bits: int, shape: tuple[int, int], group: int) -> StoredTensor:
    words = raw.integers(f"{module}.W_q")
    scales, zeros = (raw.floats(f"{module}.{x}").reshape(1, -1) for x in ("scale", "zero"))
    halves = np.empty((group, words.shape[1]), np.float16)
    for row in range(group):  # one at a time: the weight in fp32 would take twice as much again
        halves[row] = scales[0] * (_codes(words, bits, row, row + 1)[0] - zeros[0])
    return StoredTensor(f"{module}.weight", shape, F16, halves.reshape(shape).view(np.uint8))


def _codes(words: NDArray[Any], bits: int, first: int, last: int) -> NDArray[np.uint8]:
    """Of some rows, [last - first, columns of the words]."""
    rows = np.arange(first, last)
    shifts = ((27 if bits == 3 else 8 - bits) - bits * (rows // len(words))).astype(words.dtype)
    found: NDArray[np.uint8] = (words[rows % len(words)] >> shifts[:, None] & ((1 << bits) - 1)).astype(np.uint8)
    return found

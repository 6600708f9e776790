"""GPTQ, as AutoGPTQ and GPTQModel write it. A linear layer of K inputs and N outputs has

    qweight  int32 [K * bits / 32, N]      codes of a column one behind the other, inputs ascending
    qzeros   int32 [groups, N * bits / 32] likewise, outputs ascending
    scales   fp16  [groups, N]
    g_idx    int32 [K]                     the group of each input; without act-order, input // group_size

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n])

The format's first version stores zero - 1, its second (`checkpoint_format: gptq_v2`) the zero itself. Bits and groups
follow from the shapes, so layers may differ."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.bits import num_words, unpack
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import MadeTensor, modules_with, parts_of
from quire.weights.formats.grouped import grouped_integers, groups_of_inputs
from quire.weights.raw import RawTensors

BITS = (2, 3, 4, 8)


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, MadeTensor]:
    bits = quantization.expect("bits", *BITS)
    version = quantization.expect("checkpoint_format", "gptq", "gptq_v2", None)
    quantization.expect("is_marlin_format", False, None)
    missing_one = version != "gptq_v2"
    made = {}
    for module in modules_with(raw, ".qweight"):
        layer_bits = _bits(raw, module, bits)
        (words, outputs), (groups, _) = raw.shape(f"{module}.qweight"), raw.shape(f"{module}.scales")
        inputs = words * 32 // layer_bits
        raw.expect_shape(f"{module}.scales", groups, outputs)
        raw.expect_shape(f"{module}.qzeros", groups, num_words(outputs, layer_bits))
        if inputs * layer_bits % 32 or num_words(inputs, layer_bits) != words or inputs % groups:
            raise raw.bad(f"{module}.qweight", f"has {inputs} inputs of {layer_bits} bits in {groups} groups")
        parts = parts_of(raw, module, (".qweight", ".qzeros", ".scales", ".g_idx"))
        make = partial(_make, raw, module, (outputs, inputs), layer_bits, missing_one)
        made[f"{module}.weight"] = MadeTensor((outputs, inputs), parts, make)
    return made


def _bits(raw: RawTensors, module: str, bits: int) -> int:
    """Of this layer: `dynamic` rules may have given it others than the configuration says."""
    if f"{module}.g_idx" not in raw:
        return bits
    words, inputs = raw.shape(f"{module}.qweight")[0], raw.shape(f"{module}.g_idx")[0]
    found = words * 32 // max(inputs, 1)
    if found not in BITS:
        raise raw.bad(f"{module}.qweight", f"has {words} words for the {inputs} inputs of g_idx")
    return found


def _make(raw: RawTensors, module: str, shape: tuple[int, int], bits: int, missing_one: bool) -> StoredTensor:
    outputs, inputs = shape
    words = raw.integers(f"{module}.qweight").T  # [N, K * bits / 32]
    scales = np.ascontiguousarray(raw.floats(f"{module}.scales").T)  # [N, groups]
    zeros = _zeros(raw.integers(f"{module}.qzeros"), bits, outputs, missing_one).T.astype(np.float32)
    groups = groups_of_inputs(raw, f"{module}.g_idx", inputs, scales.shape[1])

    def codes(first: int, last: int) -> NDArray[np.uint8]:
        return unpack(words[first:last], bits, inputs)

    return grouped_integers(f"{module}.weight", shape, bits, codes, scales, zeros, groups)


def _zeros(words: NDArray[np.int32], bits: int, outputs: int, missing_one: bool) -> NDArray[np.uint8]:
    """[groups, N]. Where one is missing it was subtracted from the codes of a word together, so a zero borrowed from
    the next code; those of 3 bits, which cross words, were counted round."""
    if not missing_one:
        return unpack(words, bits, outputs)
    if bits == 3:
        return ((unpack(words, bits, outputs) + 1) & 7).astype(np.uint8)
    ones = np.uint32(sum(1 << place for place in range(0, 32, bits)))
    return unpack(words.view(np.uint32) + ones, bits, outputs)

"""GPTQ, as AutoGPTQ and GPTQModel write it. A linear layer of K inputs and N outputs has

    qweight  int32 [K * bits / 32, N]      packed along the inputs
    qzeros   int32 [groups, N * bits / 32] packed along the outputs
    scales   fp16  [groups, N]
    g_idx    int32 [K]                     the group of each input; without act-order, input // group_size

    w[n, k] = scales[g, n] * (q[k, n] - zero[g, n])

The format's first version stores zero - 1, its second (`checkpoint_format: gptq_v2`) the zero itself. Bits and groups
follow from the shapes, and layers may differ in them."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.bits import packed_words, unpack
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with
from quire.weights.formats.grouped import grouped_integers, groups_of_inputs
from quire.weights.raw import RawTensors

BITS = (2, 3, 4, 8)


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    bits = quantization.expect("bits", *BITS)
    version = quantization.expect("checkpoint_format", "gptq", "gptq_v2", None)
    quantization.expect("is_marlin_format", False, None)
    stored_less_one = version != "gptq_v2"
    derived = {}
    for module in modules_with(raw, ".qweight"):
        layer_bits = _bits(raw, module, bits)
        (words, outputs), (groups, _) = raw.shape(f"{module}.qweight"), raw.shape(f"{module}.scales")
        inputs = words * 32 // layer_bits
        raw.expect_shape(f"{module}.scales", groups, outputs)
        raw.expect_shape(f"{module}.qzeros", groups, packed_words(outputs, layer_bits))
        if inputs * layer_bits % 32 or packed_words(inputs, layer_bits) != words or inputs % groups:
            raise raw.bad(f"{module}.qweight", f"has {inputs} inputs of {layer_bits} bits in {groups} groups")
        size = quantization.int("group_size", -1)
        if f"{module}.g_idx" not in raw and groups != (inputs // size if size > 0 and not inputs % size else 1):
            raise raw.bad(f"{module}.scales", f"has {groups} groups for {inputs} inputs, and group_size is {size}")
        sources = module_tensors(raw, module, (".qweight", ".qzeros", ".scales", ".g_idx"))
        derive = partial(_derive, raw, module, (outputs, inputs), layer_bits, stored_less_one)
        derived[f"{module}.weight"] = DerivedTensor((outputs, inputs), sources, derive)
    return derived


def _bits(raw: RawTensors, module: str, bits: int) -> int:
    """Bits of this layer: `dynamic` rules may have set others than `bits` of the configuration."""
    if f"{module}.g_idx" not in raw:
        return bits
    words, inputs = raw.shape(f"{module}.qweight")[0], raw.shape(f"{module}.g_idx")[0]
    layer_bits = words * 32 // max(inputs, 1)
    if layer_bits not in BITS:
        raise raw.bad(f"{module}.qweight", f"has {words} words for the {inputs} inputs of g_idx")
    return layer_bits


def _derive(raw: RawTensors, module: str, shape: tuple[int, int], bits: int, stored_less_one: bool) -> StoredTensor:
    outputs, inputs = shape
    words = raw.integers(f"{module}.qweight").T  # [N, K * bits / 32]
    scales = np.ascontiguousarray(raw.floats(f"{module}.scales").T)  # [N, groups]
    zeros = _zero_points(raw.integers(f"{module}.qzeros"), bits, outputs, stored_less_one).T.astype(np.float32)
    groups = groups_of_inputs(raw, f"{module}.g_idx", inputs, scales.shape[1])

    def quantized(first: int, last: int) -> NDArray[np.uint8]:
        return unpack(words[first:last], bits, inputs)

    return grouped_integers(f"{module}.weight", shape, bits, quantized, scales, zeros, groups)


def _zero_points(words: NDArray[np.int32], bits: int, outputs: int, stored_less_one: bool) -> NDArray[np.uint8]:
    """[groups, N]. `zero - 1` was computed on whole words, so that a zero point of 0 borrowed from the next value.
    Values of 3 bits, which cross words, wrapped around instead."""
    if not stored_less_one:
        return unpack(words, bits, outputs)
    if bits == 3:
        return ((unpack(words, bits, outputs) + 1) & 7).astype(np.uint8)
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    return unpack(words.view(np.uint32) + ones, bits, outputs)

"""AWQ, as AutoAWQ writes it: 4 bits, w = scale * (q - zero). A linear layer of K inputs and N outputs has

    version    qweight            qzeros                   scales
    gemm       int32 [K, N / 8]   int32 [groups, N / 8]    fp16 [groups, N]
    gemv       int32 [N, K / 8]   int32 [N, ~groups / 8]   fp16 [N, ~groups]

The 8 values of a `gemm` word are outputs 0, 2, 4, 6, 1, 3, 5, 7. The values of a `gemv` word are inputs, or groups, in
order; the number of groups is rounded up."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.bits import unpack
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with
from quire.weights.formats.grouped import grouped_integers
from quire.weights.raw import RawTensors

GEMM_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # index in a gemm word of output 0, 1, ...


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    values = {"bits": quantization.get("w_bit"), "group_size": quantization.get("q_group_size")}  # older names
    quantization = quantization.with_values({key: value for key, value in values.items() if value is not None})
    quantization.expect("bits", 4)
    group = quantization.int("group_size")
    version = str(quantization.get("version", "gemm")).lower()
    quantization.with_values({"version": version}).expect("version", "gemm", "gemv")
    derived = {}
    for module in modules_with(raw, ".qweight"):
        shape = (_gemm if version == "gemm" else _gemv)(raw, module, group)
        sources = module_tensors(raw, module, (".qweight", ".qzeros", ".scales"))
        derive = partial(_derive, raw, module, shape, version, group if group > 0 else shape[1])
        derived[f"{module}.weight"] = DerivedTensor(shape, sources, derive)
    return derived


def _gemm(raw: RawTensors, module: str, group: int) -> tuple[int, int]:
    """-> (N, K), after a check of the shapes."""
    inputs, words = raw.shape(f"{module}.qweight")
    groups = _num_groups(raw, module, inputs, group)
    raw.expect_shape(f"{module}.scales", groups, 8 * words)
    raw.expect_shape(f"{module}.qzeros", groups, words)
    return 8 * words, inputs


def _gemv(raw: RawTensors, module: str, group: int) -> tuple[int, int]:
    outputs, words = raw.shape(f"{module}.qweight")
    groups, padded = _num_groups(raw, module, 8 * words, group), raw.shape(f"{module}.scales")[-1]
    raw.expect_shape(f"{module}.scales", outputs, max(padded, groups))
    raw.expect_shape(f"{module}.qzeros", outputs, padded // 8)
    return outputs, 8 * words


def _num_groups(raw: RawTensors, module: str, inputs: int, group: int) -> int:
    group = group if group > 0 else inputs
    if inputs % group:
        raise raw.bad(f"{module}.qweight", f"has {inputs} inputs in groups of {group}")
    return inputs // group


def _derive(raw: RawTensors, module: str, shape: tuple[int, int], version: str, group: int) -> StoredTensor:
    _, inputs = shape
    words, stored_zeros = raw.integers(f"{module}.qweight"), raw.integers(f"{module}.qzeros")
    scales, groups = raw.floats(f"{module}.scales"), inputs // group
    if version == "gemm":
        zeros = _outputs_in_order(stored_zeros).T.astype(np.float32)
        scales = np.ascontiguousarray(scales.T)
    else:
        zeros = unpack(stored_zeros, 4, groups).astype(np.float32)
        scales = np.ascontiguousarray(scales[:, :groups])

    def quantized(first: int, last: int) -> NDArray[np.uint8]:  # first and last are multiples of 32, or the end
        if version == "gemm":
            return np.ascontiguousarray(_outputs_in_order(words[:, first // 8 : last // 8]).T)
        return unpack(words[first:last], 4, inputs)

    return grouped_integers(f"{module}.weight", shape, 4, quantized, scales, zeros)


def _outputs_in_order(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[rows, N / 8] -> [rows, N]"""
    values = unpack(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    return values[..., GEMM_ORDER].reshape(len(words), -1)

"""Quantized weights that stay quantized on the GPU. Blocks of 32 weights are unpacked into values and scales.

    stored                 becomes                                    scale, offset
    Q4_0, Q4_1, Q8_0       4- or 8-bit integers in groups             as stored
    Q4_Z                   4-bit integers in groups                   fp16, with zero points; fp32 offsets where a zero
                                                                      is no small integer
    Q4_F, Q8_F, Q8_M       4- or 8-bit integers in groups             as stored
    NF4, FP4, IQ4_NL       4-bit indices into a codebook              as stored
    FP8                    e4m3, a scale an output or 128 x 128       as stored
    Q8_0, Q8_F by output   int8, where activations are to be int8     fp32
    Q4_0                   4-bit integers for fp8 activations, where activations are to be fp8
    Q2_K .. Q6_K           4- to 6-bit integers in groups             bytes and super-scales, as stored
    Q5_0, IQ4_XS, ..       4- or 8-bit integers or indices            fp32, decoded by the CPU's kernels

A scale that neighbouring blocks share, because a format has groups of 64 or 128 or rows, is kept once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.ops.dequantize import FP4_VALUES, IQ4_VALUES, NF4_VALUES
from quire.ops.gpu.linear.grouped_layout import (
    GroupedWeight,
    are_zero_points,
    pack_codebook4,
    pack_int4,
    pack_int8,
    pack_zero_points,
)
from quire.ops.gpu.linear.k_quants import K_QUANTS
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.gpu.linear.w4a8 import W4A8Weight, can_shuffle, shuffle_words
from quire.ops.tensors import FP8, Q8_0, Q8_F, StoredTensor

BLOCK, MAX_GROUP = 32, 128  # weights of a block; of a group that is merged from blocks of equal scales
FP8_BLOCK = 128  # the side of the squares that fp8 scales may belong to


@dataclass(frozen=True, slots=True, eq=False)
class ActOrderWeight:
    """A GPTQ weight with act-order: its inputs are in the order of their groups, so it is multiplied with x[:,
    order]."""

    weight: GroupedWeight
    order: Tensor

    @property
    def num_outputs(self) -> int:
        return self.weight.num_outputs

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes + self.order.nbytes)


def can_keep_quantized(tensor: StoredTensor, dtype: torch.dtype) -> bool:
    """Activations in fp32, for comparisons, have fp32 weights: tensor cores would round them."""
    if tensor.type.name not in (*KEPT, *DECODED) or tensor.dummy or dtype == torch.float32:
        return False
    return tensor.type is not FP8 or _fp8_scales(_blocks(tensor)) is not None


def load_quantized(
    parts: Sequence[StoredTensor], device: torch.device
) -> GroupedWeight | ScaledWeight | ActOrderWeight | W4A8Weight:
    """One matrix of parts that `can_concatenate`."""
    stacked = replace(
        parts[0],
        shape=(sum(part.num_rows for part in parts), parts[0].num_columns),
        data=np.concatenate([p.data if p.row_order is None else p.data[p.row_order] for p in parts]),
        row_order=None,
    )
    if (by_output := _int8_by_output(stacked, device)) is not None:
        return by_output
    keep = KEPT.get(stacked.type.name)
    weight = keep(_blocks(stacked), device) if keep is not None else _decoded(stacked, device)
    if stacked.column_order is None:
        return for_fp8_rows(weight) if stacked.activations == "fp8" else weight
    assert isinstance(weight, GroupedWeight)
    return ActOrderWeight(weight, torch.from_numpy(stacked.column_order.astype(np.int64)).to(device))


def for_fp8_rows(weight: GroupedWeight | ScaledWeight) -> GroupedWeight | ScaledWeight | W4A8Weight:
    """The weight for fp8 rows: as W4A8 where it can be; else as it is."""
    return shuffle_words(weight) if isinstance(weight, GroupedWeight) and can_shuffle(weight) else weight


def _int8_by_output(tensor: StoredTensor, device: torch.device) -> ScaledWeight | None:
    """None where activations are not to be int8, or an output has several scales."""
    if tensor.activations != "int8" or tensor.type not in (Q8_0, Q8_F) or tensor.column_order is not None:
        return None
    scale = np.float16 if tensor.type is Q8_0 else np.float32
    blocks = _blocks(tensor)
    scales = _floats(blocks, 0, scale, device).float()
    if not torch.equal(scales, scales[:, :1].expand_as(scales)):
        return None
    return ScaledWeight(_bytes(blocks, np.dtype(scale).itemsize, device), scales[:, 0].contiguous())


def can_concatenate(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether the rows of `b` may follow those of `a`. Squares of fp8 scales must end where the rows of `a` end."""
    orders = [t.column_order.tobytes() if t.column_order is not None else b"" for t in (a, b)]
    alike = a.type == b.type and a.activations == b.activations and orders[0] == orders[1]
    return alike and (a.type is not FP8 or a.num_rows % FP8_BLOCK == 0)


def _blocks(tensor: StoredTensor) -> np.ndarray:
    """uint8 [rows, groups, block_bytes]"""
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    return np.ascontiguousarray(data).reshape(tensor.num_rows, -1, tensor.type.block_bytes)


def _floats(blocks: np.ndarray, offset: int, dtype: type, device: torch.device) -> Tensor:
    """The float `offset` bytes into every block: [rows, groups]"""
    size = np.dtype(dtype).itemsize
    return torch.from_numpy(np.ascontiguousarray(blocks[..., offset : offset + size]).view(dtype)[..., 0]).to(device)


def _nibbles(blocks: np.ndarray, offset: int, device: torch.device) -> Tensor:
    """16 bytes: the first 16 values in their low halves, the others in the high ones -> [rows, inputs]"""
    words = torch.from_numpy(np.ascontiguousarray(blocks[..., offset : offset + 16])).to(device)
    return torch.cat([words & 15, words >> 4], dim=-1).flatten(1)


def _bytes(blocks: np.ndarray, offset: int, device: torch.device) -> Tensor:
    """32 values of 8 bits -> int8 [rows, inputs]"""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., offset:]).view(np.int8)).to(device).flatten(1)


def _merge_groups(*fields: Tensor) -> tuple[Tensor, ...]:
    """[rows, groups] each: merge pairs of neighbours that are equal everywhere, again and again."""
    group = BLOCK
    while group < MAX_GROUP and fields[0].shape[1] % 2 == 0:
        pairs = [field.unflatten(1, (-1, 2)) for field in fields]
        if not all(torch.equal(pair[..., 0], pair[..., 1]) for pair in pairs):
            break
        fields = tuple(pair[..., 0].contiguous() for pair in pairs)
        group *= 2
    return fields


def _q4_0(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    (scales,) = _merge_groups(_floats(blocks, 0, np.float16, device))
    return pack_int4(_nibbles(blocks, 2, device), scales, zero=8)


def _q4_1(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    fields = [_floats(blocks, offset, np.float16, device) for offset in (0, 2)]
    return pack_int4(_nibbles(blocks, 4, device), *_merge_groups(*fields))


def _q4_z(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    scales, zeros = _merge_groups(*(_floats(blocks, offset, np.float16, device) for offset in (0, 2)))
    q = _nibbles(blocks, 4, device)
    if are_zero_points(zeros):
        return pack_zero_points(q, scales, zeros)
    return pack_int4(q, scales, -scales.float() * zeros.float())


def _q4_f(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    fields = [_floats(blocks, offset, np.float32, device) for offset in (0, 4)]
    return pack_int4(_nibbles(blocks, 8, device), *_merge_groups(*fields))


def _q8_0(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    return pack_int8(_bytes(blocks, 2, device), *_merge_groups(_floats(blocks, 0, np.float16, device)))


def _q8_f(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    return pack_int8(_bytes(blocks, 4, device), *_merge_groups(_floats(blocks, 0, np.float32, device)))


def _q8_m(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
    fields = [_floats(blocks, offset, np.float32, device) for offset in (0, 4)]
    return pack_int8(_bytes(blocks, 8, device), *_merge_groups(*fields))


def _codebook4(codebook: np.ndarray, scale: type) -> Callable[[np.ndarray, torch.device], GroupedWeight]:
    def pack(blocks: np.ndarray, device: torch.device) -> GroupedWeight:
        (scales,) = _merge_groups(_floats(blocks, 0, scale, device))
        return pack_codebook4(_nibbles(blocks, np.dtype(scale).itemsize, device), scales, codebook.tolist())

    return pack


def _decoded(tensor: StoredTensor, device: torch.device) -> GroupedWeight:
    from quire.ops.compiled import native

    q, scales, offsets, codebook = native.decode(tensor.type.name, tensor.data, tensor.num_columns)
    on_device = torch.from_numpy(q).to(device)
    fields = [torch.from_numpy(field).to(device) for field in (scales, offsets) if field is not None]
    if codebook is not None and DECODED[tensor.type.name] == 8:
        on_device, codebook = torch.tensor(codebook, dtype=torch.int8, device=device)[on_device.long()], None
    if codebook is not None:
        return pack_codebook4(on_device.view(torch.uint8), fields[0], [float(value) for value in codebook])
    if DECODED[tensor.type.name] == 4:
        return pack_int4(on_device.view(torch.uint8), *fields)
    return pack_int8(on_device, *fields)


def _fp8(blocks: np.ndarray, device: torch.device) -> ScaledWeight:
    q = _bytes(blocks, 4, device).view(torch.float8_e4m3fn)
    scales = _fp8_scales(blocks)
    assert scales is not None
    return ScaledWeight(q, torch.from_numpy(scales).to(device))


def _fp8_scales(blocks: np.ndarray) -> np.ndarray | None:
    """[rows] where a row has one scale, [rows / 128, inputs / 128] where squares have one, else None."""
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float32)[..., 0]  # [rows, groups]
    if np.all(scales == scales[:, :1]):
        return np.ascontiguousarray(scales[:, 0])
    by_square = scales[::FP8_BLOCK, :: FP8_BLOCK // BLOCK]
    each = np.repeat(np.repeat(by_square, FP8_BLOCK, axis=0), FP8_BLOCK // BLOCK, axis=1)
    same = np.array_equal(each[: len(scales), : scales.shape[1]], scales)
    return np.ascontiguousarray(by_square) if same else None


# Bits of a value. Codebook entries themselves are kept where 16 weights share a scale.
DECODED = {
    "Q5_0": 8, "Q5_1": 8, "IQ4_XS": 4, "MXFP4": 4, "NVFP4": 8, "IQ1_S": 4, "IQ1_M": 8, "IQ2_XXS": 4, "IQ2_XS": 8,
    "IQ2_S": 8, "IQ3_XXS": 4, "IQ3_S": 4, "TQ1_0": 8, "TQ2_0": 8,
}  # fmt: skip

KEPT: dict[str, Callable[[np.ndarray, torch.device], GroupedWeight | ScaledWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_Z": _q4_z,
    "Q4_F": _q4_f,
    "Q8_F": _q8_f,
    "Q8_M": _q8_m,
    "NF4": _codebook4(NF4_VALUES, np.float32),
    "FP4": _codebook4(FP4_VALUES, np.float32),
    "IQ4_NL": _codebook4(IQ4_VALUES, np.float16),
    "FP8": _fp8,
    **K_QUANTS,
}

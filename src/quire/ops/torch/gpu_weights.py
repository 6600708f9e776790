"""From stored tensors to weights on the GPU: 16-bit floats, codes in groups, or 8-bit codes with scales.

GGUF's Q4_0, Q4_1 and Q8_0 keep their codes; other quantized types become floats of the activations' type. A checkpoint
of floats can be quantized on its way: fp8 (one scale an output), int8 and int4 (groups of 128 inputs). Experts are kept
or quantized likewise, fp8 apart."""

from collections.abc import Callable, Sequence
from math import gcd
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import Unsupported
from quire.ops.dequantize import dequantize
from quire.ops.tensors import BF16, F16, F32, Q4_0, Q4_1, Q8_0, StoredTensor
from quire.ops.torch.kernels.moe_codes import CodedExperts, stack_experts
from quire.ops.torch.kernels.quant_layout import GroupedWeight, pack_int4, pack_int8
from quire.ops.torch.kernels.quant_scaled import ScaledWeight

Segment: TypeAlias = Tensor | GroupedWeight | ScaledWeight

FLOATS = {F32.name: torch.float32, F16.name: torch.float16, BF16.name: torch.bfloat16}
GROUP, LEAST_GROUP = 128, 16  # inputs that share a scale, where we choose; rows of odd lengths stay floats
FP8_MOST = 448.0
DUMMY_SPREAD = 0.02  # of random weights: about what training begins with


def load_floats(tensor: StoredTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-> the tensor in its own shape."""
    if tensor.dummy:
        noise = torch.Generator(device).manual_seed(len(tensor.name))
        return torch.randn(tensor.shape, generator=noise, dtype=dtype, device=device) * DUMMY_SPREAD
    stored = FLOATS.get(tensor.type.name)
    if stored is None:
        return torch.from_numpy(dequantize(tensor)).to(device).to(dtype).reshape(tensor.shape)
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    return torch.from_numpy(np.array(data)).to(device).view(stored).to(dtype).reshape(tensor.shape)


def load_segments(
    parts: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device, quantization: str | None
) -> list[Segment]:
    """The parts' rows one below the other; neighbours of one kind are one segment."""
    if quantization is not None:
        if not all(part.type.name in FLOATS for part in parts):
            raise Unsupported(f"{parts[0].name} is quantized already", "leave out `quantization`")
        floats = torch.cat([load_floats(part, dtype, device) for part in parts])
        return [QUANTIZERS[quantization](floats) if floats.shape[1] % LEAST_GROUP == 0 else floats]
    segments: list[Segment] = []
    kinds = [_kind(part, dtype) for part in parts]
    for index, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        if kind != "floats":
            segments.append(KEPT[kind](part, device))
        elif index and kinds[index - 1] == "floats":
            segments[-1] = torch.cat([segments[-1], load_floats(part, dtype, device)])
        else:
            segments.append(load_floats(part, dtype, device))
    return segments


def load_experts(
    experts: Sequence[Sequence[StoredTensor]], dtype: torch.dtype, device: torch.device, quantization: str | None
) -> Tensor | CodedExperts:
    """Each expert's parts one below the other. Codes are kept, or made, where all experts have them of one kind; else
    all become floats [experts, outputs, inputs]."""
    if quantization == "fp8":
        raise Unsupported("experts cannot be quantized to fp8 while they are loaded", "use int8 or int4")
    kinds = {_kind(part, dtype) for parts in experts for part in parts}
    if quantization is not None or (len(kinds) == 1 and kinds <= KEPT.keys()):
        segments = [load_segments([part], dtype, device, quantization)[0] for parts in experts for part in parts]
        grouped = [segment for segment in segments if isinstance(segment, GroupedWeight)]
        if len(grouped) == len(segments):
            return stack_experts(grouped, len(experts))
    num_outputs, num_inputs = sum(part.num_rows for part in experts[0]), experts[0][0].num_columns
    stacked = torch.empty(len(experts), num_outputs, num_inputs, dtype=dtype, device=device)
    for matrix, parts in zip(stacked, experts, strict=True):
        torch.cat([load_floats(part, dtype, device) for part in parts], out=matrix)
    return stacked


def _kind(part: StoredTensor, dtype: torch.dtype) -> str:
    """Matrix units round fp32: who computes in it, to compare, gets weights of it as well."""
    kept = part.type.name in KEPT and not part.dummy and dtype != torch.float32
    return part.type.name if kept else "floats"


# -- codes that are kept -----------------------------------------------------------------------------------------------


def _blocks(tensor: StoredTensor) -> np.ndarray:
    """uint8 [rows, groups, block_bytes]"""
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    return np.ascontiguousarray(data).reshape(tensor.num_rows, -1, tensor.type.block_bytes)


def _halves(blocks: np.ndarray, at: int, device: torch.device) -> Tensor:
    """The fp16 number `at` bytes into every block: [rows, groups]"""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]).to(device)


def _nibbles(blocks: np.ndarray, at: int, device: torch.device) -> Tensor:
    """16 bytes: the first 16 codes in their low halves, the others in the high ones -> [rows, inputs]"""
    words = torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 16])).to(device)
    return torch.cat([words & 15, words >> 4], dim=-1).flatten(1)


def _q4_0(tensor: StoredTensor, device: torch.device) -> GroupedWeight:
    blocks = _blocks(tensor)
    return pack_int4(_nibbles(blocks, 2, device), _halves(blocks, 0, device), zero=8)


def _q4_1(tensor: StoredTensor, device: torch.device) -> GroupedWeight:
    blocks = _blocks(tensor)
    return pack_int4(_nibbles(blocks, 4, device), _halves(blocks, 0, device), _halves(blocks, 2, device))


def _q8_0(tensor: StoredTensor, device: torch.device) -> GroupedWeight:
    blocks = _blocks(tensor)
    codes = torch.from_numpy(np.ascontiguousarray(blocks[..., 2:]).view(np.int8)).to(device).flatten(1)
    return pack_int8(codes, _halves(blocks, 0, device))


KEPT = {Q4_0.name: _q4_0, Q4_1.name: _q4_1, Q8_0.name: _q8_0}


# -- codes that we make ------------------------------------------------------------------------------------------------


def _to_fp8(w: Tensor) -> ScaledWeight:
    scales = w.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / FP8_MOST
    return ScaledWeight((w.float() / scales).to(torch.float8_e4m3fn), scales[:, 0].contiguous())


def _groups(w: Tensor) -> Tensor:
    """[outputs, groups, inputs of a group]: of 128, or the largest power of two that divides a row."""
    return w.float().unflatten(1, (-1, gcd(w.shape[1], GROUP)))


def _to_int8(w: Tensor) -> GroupedWeight:
    groups = _groups(w)
    scales = (groups.abs().amax(2) / 127).clamp(min=1e-8).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-127, 127)
    return pack_int8(codes.to(torch.int8).flatten(1), scales)


def _to_int4(w: Tensor) -> GroupedWeight:
    groups = _groups(w)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).clamp(min=1e-8).half()
    offsets = low.half()
    codes = ((groups - offsets.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    return pack_int4(codes.to(torch.uint8).flatten(1), scales, offsets)


QUANTIZERS: dict[str, Callable[[Tensor], Segment]] = {"fp8": _to_fp8, "int8": _to_int8, "int4": _to_int4}

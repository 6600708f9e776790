"""From stored tensors to weights on the GPU: 16-bit floats, quantized in groups, or 8 bits with scales.

The types of linear/quantized_weights.py stay quantized; other quantized types become floats of the activations' type. A
float checkpoint can be quantized while it is loaded: fp8 and w8a8 (8 bits on both sides, one scale an output), int8,
int4 and w4a8 (groups of 128 inputs), nf4 (groups of 64). The same holds for experts, except that experts with act-order
become floats, and that experts of w8a8 and w4a8 have 16-bit activations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import Unsupported
from quire.ops.dequantize import NF4_VALUES, dequantize
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantized_weights import (
    ActOrderWeight,
    can_concatenate,
    can_keep_quantized,
    load_quantized,
)
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.gpu.linear.w4a8 import W4A8Weight, pack_w4a8
from quire.ops.gpu.moe.moe import Experts, ScaledExperts, can_stack_scaled, stack_scaled
from quire.ops.gpu.moe.quantized import QuantizedExperts, can_stack, stack_experts
from quire.ops.opset import Keep, quantization_of
from quire.ops.tensors import BF16, F8_E4M3, F8_E5M2, F16, F32, StoredTensor

Segment: TypeAlias = Tensor | GroupedWeight | ScaledWeight | ActOrderWeight | W4A8Weight

FLOATS = {
    F32.name: torch.float32,
    F16.name: torch.float16,
    BF16.name: torch.bfloat16,
    F8_E4M3.name: torch.float8_e4m3fn,
    F8_E5M2.name: torch.float8_e5m2,
}
GROUP, MIN_GROUP = 128, 16  # inputs that share a scale; rows that are no multiple of MIN_GROUP stay floats
NF4_GROUP = 64
FP8_MAX = 448.0
MIN_FP16 = 2.0**-24  # a scale that fp16 does not round to 0
W4A8_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range
EXPERT_QUANTIZATION = {"w8a8": "int8", "w4a8": "int4"}
DUMMY_STD = 0.02  # of random weights: about that of a model before training


def load_floats(tensor: StoredTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-> the tensor, in its own shape"""
    if tensor.dummy and tensor.name.endswith("bias"):
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    if tensor.dummy:
        noise = torch.Generator(device).manual_seed(len(tensor.name))
        return torch.randn(tensor.shape, generator=noise, dtype=dtype, device=device) * DUMMY_STD
    stored = FLOATS.get(tensor.type.name)
    if stored is None:
        return torch.from_numpy(dequantize(tensor)).to(device).to(dtype).reshape(tensor.shape)
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    return torch.from_numpy(np.array(data)).to(device).view(stored).to(dtype).reshape(tensor.shape)


def quantization_for(parts: Sequence[StoredTensor], requested: str | None, keep: Keep) -> str | None:
    """The quantization of a matrix, as `quantization_of` says. With w4a8, what is quantized already and keeps its bits
    stays as it is."""
    if requested == "w4a8" and keep is not Keep.NOTHING and parts[0].type.name not in FLOATS:
        return None
    return quantization_of(requested, keep)


def load_segments(
    parts: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device, quantization: str | None
) -> list[Segment]:
    """Stack the rows of the parts; neighbours of one kind are one segment."""
    if quantization == "w4a8" and parts[0].type.name not in FLOATS:  # activations alone are quantized here
        parts, quantization = [replace(part, activations="fp8") for part in parts], None
    if quantization is not None:
        if not all(part.type.name in FLOATS for part in parts):
            raise Unsupported(f"{parts[0].name} is quantized already", "leave out `quantization`")
        floats = torch.cat([load_floats(part, dtype, device) for part in parts])
        return [QUANTIZERS[quantization](floats) if floats.shape[1] % MIN_GROUP == 0 else floats]
    segments: list[Segment] = []
    for alike in _runs(parts, dtype):
        if can_keep_quantized(alike[0], dtype):
            segments.append(load_quantized(alike, device))
        else:
            segments.append(torch.cat([load_floats(part, dtype, device) for part in alike]))
    return segments


def _runs(parts: Sequence[StoredTensor], dtype: torch.dtype) -> list[list[StoredTensor]]:
    """Neighbours that become one segment: those that become floats, or those that stay quantized in one type."""
    runs: list[list[StoredTensor]] = []
    for part in parts:
        kept = can_keep_quantized(part, dtype)
        before = runs[-1][-1] if runs else None
        if (
            before is not None
            and kept == can_keep_quantized(before, dtype)
            and (not kept or can_concatenate(before, part))
        ):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def load_experts(
    experts: Sequence[Sequence[StoredTensor]], dtype: torch.dtype, device: torch.device, quantization: str | None
) -> Experts:
    """Stack each expert's parts. Experts stay quantized, or are quantized, where all are of one kind; else all become
    floats [experts, outputs, inputs]."""
    all_parts = [replace(part, activations="") for parts in experts for part in parts]
    quantization = EXPERT_QUANTIZATION.get(quantization or "", quantization)
    if quantization is not None or all(can_keep_quantized(part, dtype) for part in all_parts):
        segments = [load_segments([part], dtype, device, quantization)[0] for part in all_parts]
        if (stacked := _stack(segments, len(experts))) is not None:
            return stacked
    num_outputs, num_inputs = sum(part.num_rows for part in experts[0]), experts[0][0].num_columns
    floats = torch.empty(len(experts), num_outputs, num_inputs, dtype=dtype, device=device)
    for matrix, parts in zip(floats, experts, strict=True):
        torch.cat([load_floats(part, dtype, device) for part in parts], out=matrix)
    return floats


def _stack(segments: Sequence[Segment], num_experts: int) -> QuantizedExperts | ScaledExperts | None:
    """None where the experts are of several kinds."""
    grouped = [segment for segment in segments if isinstance(segment, GroupedWeight)]
    if len(grouped) == len(segments) and can_stack(grouped):
        return stack_experts(grouped, num_experts)
    scaled = [segment for segment in segments if isinstance(segment, ScaledWeight)]
    if len(scaled) == len(segments) and can_stack_scaled(scaled):
        return stack_scaled(scaled, num_experts)
    return None


# -- quantization while loading ----------------------------------------------------------------------------------------


def _to_fp8(w: Tensor) -> ScaledWeight:
    scales = w.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    return ScaledWeight((w.float() / scales).to(torch.float8_e4m3fn), scales[:, 0].contiguous())


def _to_w8a8(w: Tensor) -> ScaledWeight:
    scales = w.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 127
    return ScaledWeight((w.float() / scales).round().to(torch.int8), scales[:, 0].contiguous())


def _groups(w: Tensor) -> Tensor:
    """[outputs, groups, inputs of a group]: groups of 128, or of the largest power of two that divides a row."""
    return w.float().unflatten(1, (-1, gcd(w.shape[1], GROUP)))


def _to_int8(w: Tensor) -> GroupedWeight:
    groups = _groups(w)
    scales = (groups.abs().amax(2) / 127).clamp(min=MIN_FP16).half()
    q = (groups / scales.float()[..., None]).round().clamp(-127, 127)
    return pack_int8(q.to(torch.int8).flatten(1), scales)


def _to_int4(w: Tensor) -> GroupedWeight:
    """With a zero point for each group, as GPTQ and AWQ files have them."""
    groups = _groups(w)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=MIN_FP16).half()
    points = (-low / scales.float()).round().clamp(0, 15)
    q = ((groups / scales.float()[..., None]).round() + points[..., None]).clamp(0, 15)
    return pack_zero_points(q.to(torch.uint8).flatten(1), scales, points)


def _to_w4a8(w: Tensor) -> Segment:
    """Symmetric. A group's range is cut where that makes the squared error of its weights less."""
    if w.shape[1] % 32:
        return w
    groups = _groups(w)
    widest = torch.maximum(groups.amax(2) / 7, groups.amin(2) / -8).clamp(min=MIN_FP16)
    scales, least = widest.half(), torch.full_like(widest, torch.inf)
    for share in W4A8_RANGES:
        tried = (share * widest).clamp(min=MIN_FP16).half()
        error = (_round_to_4_bits(groups, tried) * tried.float()[..., None] - groups).square().sum(2)
        scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
    return pack_w4a8((_round_to_4_bits(groups, scales) + 8).to(torch.uint8).flatten(1), scales)


def _round_to_4_bits(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales.float()[..., None]).round().clamp(-8, 7)


def _to_nf4(w: Tensor) -> GroupedWeight:
    """Quantized to NF4 in groups of 64, as bitsandbytes has them."""
    groups = w.float().unflatten(1, (-1, gcd(w.shape[1], NF4_GROUP)))
    scales = groups.abs().amax(2)
    codebook = torch.from_numpy(NF4_VALUES).to(w.device)
    q = torch.bucketize(groups / scales.clamp(min=1e-12)[..., None], (codebook[1:] + codebook[:-1]) / 2)
    return pack_codebook4(q.to(torch.uint8).flatten(1), scales, NF4_VALUES.tolist())


QUANTIZERS: dict[str, Callable[[Tensor], Segment]] = {
    "fp8": _to_fp8,
    "int8": _to_int8,
    "int4": _to_int4,
    "nf4": _to_nf4,
    "w8a8": _to_w8a8,
    "w4a8": _to_w4a8,
}

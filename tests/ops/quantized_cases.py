"""Quantized matrices as kernels take them, and the fp32 matrices that they stand for."""

from typing import Any

import torch
from torch import Tensor

from ops.gemms import DEVICE, HALF, integers, randn, spread
from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize as plain_numbers
from quire.ops.gpu.linear.grouped_layout import pack_codebook4, pack_int4, pack_int8
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

NF4 = [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]
N, K = 70, 384


def int4_case(group: int, zero: int, scale_dtype: torch.dtype, offset_dtype: torch.dtype | None, K: int = K) -> Any:
    """-> packed, and the fp32 matrix that it stands for"""
    q = integers(0, 16, N, K)
    scales = randn(N, K // group, seed=1).to(scale_dtype)
    offsets = None if offset_dtype is None else randn(N, K // group, seed=2).to(offset_dtype)
    plain = spread(scales, K) * (q - zero) + (0 if offsets is None else spread(offsets, K))
    return pack_int4(q.to(torch.uint8), scales, offsets, zero), plain


def codebook_case(group: int) -> Any:
    q, scales = integers(0, 16, N, K), randn(N, K // group, seed=1).half()
    plain = spread(scales, K) * torch.tensor(NF4, device=DEVICE).to(HALF).float()[q]
    return pack_codebook4(q.to(torch.uint8), scales, NF4), plain


def int8_case(group: int, scale_dtype: torch.dtype, offset_dtype: torch.dtype | None) -> Any:
    q = integers(-128, 128, N, K)
    scales = randn(N, K // group, seed=1).to(scale_dtype)
    offsets = None if offset_dtype is None else randn(N, K // group, seed=2).to(offset_dtype)
    plain = spread(scales, K) * q + (0 if offsets is None else spread(offsets, K))
    return pack_int8(q.to(torch.int8), scales, offsets), plain


def stored_case(name: str, K: int = 512) -> Any:
    """As a file has it."""
    tensor = StoredTensor(name, (N, K), STORAGE_TYPES[name], stored_rows(STORAGE_TYPES[name], N, K))
    return load_quantized([tensor], torch.device(DEVICE)), torch.from_numpy(plain_numbers(tensor)).to(DEVICE)


CASES = {
    "Q4_0": lambda: int4_case(32, 8, torch.float16, None),
    "Q4_1": lambda: int4_case(32, 0, torch.float16, torch.float16),
    "fp32 scales": lambda: int4_case(32, 0, torch.float32, torch.float32),
    "GPTQ": lambda: int4_case(128, 0, torch.float16, torch.float32),
    "groups of 64": lambda: int4_case(64, 8, torch.bfloat16, None),
    "odd K": lambda: int4_case(16, 8, torch.float16, None, K=144),
    "NF4": lambda: codebook_case(64),
    "MXFP4": lambda: codebook_case(32),
    "MXFP4 as stored": lambda: stored_case("MXFP4", K=480),  # chunks of 128: the last one is not whole
    "MXFP4 in chunks of 256": lambda: stored_case("MXFP4", K=768),
    "Q8_0": lambda: int8_case(32, torch.float16, None),
    "NVFP4": lambda: int8_case(16, torch.float32, None),
    "int8 with offsets": lambda: int8_case(16, torch.float32, torch.float32),
    "int8 rows": lambda: int8_case(K, torch.float32, None),
    "Q2_K": lambda: stored_case("Q2_K"),
    "Q3_K": lambda: stored_case("Q3_K"),
    "Q4_K": lambda: stored_case("Q4_K"),
    "Q5_K": lambda: stored_case("Q5_K"),
    "Q6_K": lambda: stored_case("Q6_K"),
}


def exact_codes(x: Tensor, dtype: torch.dtype, group: int) -> QuantizedRows:
    """As `quantize_rows`, by torch, whose rounding to fp8 is right everywhere."""
    most = 127.0 if dtype == torch.int8 else 448.0
    groups = torch.nn.functional.pad(x, (0, -len(x[0]) % (group or 1))).unflatten(1, (-1, group or len(x[0])))
    scales = groups.abs().amax(-1) / most
    q = (groups / scales[..., None]).flatten(1)[:, : len(x[0])]
    return QuantizedRows((q.round() if dtype == torch.int8 else q).to(dtype).contiguous(), scales)


def scaled_case(M: int, N: int, K: int, dtype: torch.dtype, by_blocks: bool) -> tuple[QuantizedRows, ScaledWeight]:
    x = exact_codes(randn(M, K), dtype, 128 if by_blocks else 0)
    if by_blocks:
        w, scales = randn(N, K, seed=1).clamp(-4, 4).to(dtype), randn(-(-N // 128), -(-K // 128), seed=2).abs()
    else:
        w, scales = exact_codes(randn(N, K, seed=1), dtype, 0)
        scales = scales.flatten()
    return x, ScaledWeight(w, scales)


def plain(x: QuantizedRows, weight: ScaledWeight) -> tuple[Tensor, Tensor]:
    """-> the fp32 matrices"""
    (N, K), w_scales = weight.q.shape, weight.scales
    if not weight.by_blocks:
        return x.q.float() * x.scales, weight.q.float() * w_scales[:, None]
    x_scales = x.scales.repeat_interleave(128, dim=1)[:, :K]
    w_scales = w_scales.repeat_interleave(128, dim=0)[:N].repeat_interleave(128, dim=1)[:, :K]
    return x.q.float() * x_scales, weight.q.float() * w_scales

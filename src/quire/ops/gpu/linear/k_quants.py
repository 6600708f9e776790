"""GGUF's K-quants as a GPU keeps them. A block of 256 weights is unpacked into quantized values, scales and offsets of
8 or 16 groups, a byte or six bits each, and fp16 super-scales. ops/dequantize.py defines the fields of a block."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_six_bits, pack_super_scaled


def _q2_k(blocks: Tensor) -> GroupedWeight:
    scales, q, super_scales = blocks.split((16, 64, 4), dim=-1)
    return pack_super_scaled(
        _unpack_bits(q, 2, 32), _bytes(torch.stack([scales & 15, scales >> 4], dim=-1)), _super_scales(super_scales)
    )


def _q3_k(blocks: Tensor) -> GroupedWeight:
    third, q, scales, super_scales = blocks.split((32, 64, 12, 2), dim=-1)
    low, high = scales.split((8, 4), dim=-1)
    six_bits = (_unpack_bits(low, 4, 8) | _unpack_bits(high, 2, 4) << 4).unflatten(1, (-1, 16))
    q = _unpack_bits(q, 2, 32) + (_unpack_bits(third, 1, 32) << 2)
    return pack_super_scaled(q + 4, _bytes(six_bits - 32), _super_scales(super_scales), zero=8)


def _q4_k(blocks: Tensor) -> GroupedWeight:
    super_scales, scales, q = blocks.split((4, 12, 128), dim=-1)
    return pack_six_bits(_unpack_bits(q, 4, 32), scales, _super_scales(super_scales))


def _q5_k(blocks: Tensor) -> GroupedWeight:
    super_scales, scales, fifth, q = blocks.split((4, 12, 32, 128), dim=-1)
    q = _unpack_bits(q, 4, 32) | _unpack_bits(fifth, 1, 32) << 4
    # Scales of six bits would make a GEMV a sixth slower.
    return pack_super_scaled(q, _pairs(scales), _super_scales(super_scales), high_bits=1)


def _q6_k(blocks: Tensor) -> GroupedWeight:
    low, high, scales, super_scales = blocks.split((128, 64, 16, 2), dim=-1)
    q = _unpack_bits(low, 4, 64) | _unpack_bits(high, 2, 32) << 4
    return pack_super_scaled(q, _bytes(scales), _super_scales(super_scales), high_bits=2, zero=32)


def _unpack_bits(field: Tensor, bits: int, run: int) -> Tensor:
    """Of every `run` bytes the lowest bits, then the next, and so on: [rows, blocks, bytes] -> [rows, values]"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device)[:, None]
    each = field.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1  # [rows, blocks, runs, 8 / bits, run]
    return each.flatten(1)


def _pairs(packed: Tensor) -> Tensor:
    """Scales and offsets of six bits in 12 bytes -> [rows, groups, 2]"""
    a, b, c = packed.split(4, dim=-1)
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], dim=-1)
    offsets = torch.cat([b & 63, c >> 4 | b >> 6 << 4], dim=-1)
    return _bytes(torch.stack([scales, offsets], dim=-1))


def _bytes(scales: Tensor) -> Tensor:
    """[rows, blocks, groups of a block, ..] -> int8 [rows, groups, ..]"""
    return scales.flatten(1, 2).view(torch.int8)


def _super_scales(field: Tensor) -> Tensor:
    """-> fp16 [rows, blocks], or of two [rows, blocks, 2]"""
    values = field.contiguous().view(torch.float16)
    return values[..., 0] if values.shape[-1] == 1 else values


def _on_device(pack: Callable[[Tensor], GroupedWeight]) -> Callable[[np.ndarray, torch.device], GroupedWeight]:
    return lambda blocks, device: pack(torch.from_numpy(blocks).to(device))


K_QUANTS = {
    name: _on_device(pack)
    for name, pack in {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}.items()
}

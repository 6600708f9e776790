"""Rotary position embedding (RoPE) in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Frequencies:
    inv_freq: Tensor  # [rotary_dim / 2]
    scale: float  # of cos and sin


def rope_angles(positions: Tensor, frequencies: Frequencies) -> Tensor:
    """positions [T] -> [T, rotary_dim]: cos of position * frequency, then sin."""
    angles = positions[:, None].float() * frequencies.inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * frequencies.scale


def rotate_heads(heads: Tensor, angles: Tensor) -> Tensor:
    """heads [T, heads, head_dim], angles [T, rotary_dim] -> the same, rotated in fp32. See `OpSet.rope`."""
    rotary_dim = angles.shape[-1]
    cos, sin = angles[:, None].chunk(2, dim=-1)  # [T, 1, rotary_dim / 2] each
    a, b = heads[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin, heads[..., rotary_dim:].float()], dim=-1)
    return rotated.to(heads.dtype)

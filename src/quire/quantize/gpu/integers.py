"""`integers.py` in torch: scales, zero points and packed words on a device.

Searches lose as little as the compiled ones, and take the same candidates; where two lose the same but for the order of
a sum, they may choose the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.quantize.gpu.host import to_host
from quire.quantize.integers import SHRINKS, GroupedIntegers, IntegerGrid
from quire.quantize.search import MAX_FP16, SMALLEST_SCALE, offset_factors

SEARCHED_VALUES = 1 << 26  # candidates times weights, computed at once


@dataclass(frozen=True, slots=True, eq=False)
class TorchIntegers(GroupedIntegers):
    """`q_on`, `scales_on`, `zeros_on`: the same as q, scales and zeros, on the device. Of q, only what a format
    packs comes to the host."""

    q_on: Tensor | None = None
    scales_on: Tensor | None = None
    zeros_on: Tensor | None = None

    @classmethod
    def of(
        cls, bits: int, q: Tensor, scales: Tensor, zeros: Tensor, groups: NDArray[np.int32] | None = None
    ) -> "TorchIntegers":
        shape = np.broadcast_to(np.uint8(0), tuple(q.shape))  # of which only the shape is read
        return cls(bits, shape, to_host(scales), to_host(zeros), groups, q, scales, zeros)

    def values(self) -> Tensor:
        assert self.q_on is not None and self.scales_on is not None and self.zeros_on is not None
        scales, zeros = self.scales_on.float(), self.zeros_on.float()
        if self.groups is not None:
            groups = torch.from_numpy(self.groups.astype(np.int64)).to(self.q_on.device)
            return scales[:, groups] * (self.q_on.float() - zeros[:, groups])
        grouped = self.q_on.float().unflatten(1, (scales.shape[1], -1))
        return (scales[..., None] * (grouped - zeros[..., None])).flatten(1)

    def packed_inputs(self) -> NDArray[np.int32]:
        assert self.q_on is not None
        return _packed(self.q_on, self.bits)

    def packed_outputs(self, order: Sequence[int]) -> NDArray[np.int32]:
        assert self.q_on is not None
        by_word = self.q_on.T.reshape(self.q_on.shape[1], -1, 8)[..., list(order)]
        return _packed(by_word.flatten(1), 4)

    def signed(self) -> NDArray[np.int8]:
        assert self.q_on is not None
        return to_host((self.q_on - (1 << (self.bits - 1))).view(torch.int8))


def _packed(values: Tensor, bits: int) -> NDArray[np.int32]:
    """`integers.packed`"""
    if 8 % bits:
        places = torch.arange(bits, dtype=torch.uint8, device=values.device)
        values, bits = (values[..., None] >> places & 1).flatten(1), 1
    each = 8 // bits
    values = F.pad(values, (0, -values.shape[1] % (32 // bits)))
    in_bytes = values[:, ::each].clone()
    for place in range(1, each):
        in_bytes |= values[:, place::each] << place * bits
    return to_host(in_bytes).view(np.int32)


def to_fp16(values: Tensor) -> Tensor:
    """Without zeros: readers divide by scales."""
    stored = values.clamp(-float(MAX_FP16), float(MAX_FP16)).half()
    return stored.masked_fill(stored == 0, float(SMALLEST_SCALE))


def inverse(scale: Tensor) -> Tensor:
    inverted = 1 / scale
    return inverted.masked_fill(~inverted.isfinite(), 0.0)


def ranges(x: Tensor, grid: IntegerGrid, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`integers.ranges`: x [groups, size], weights of errors [groups, size] or [1, size]"""
    half = (grid.levels + 1) // 2
    if grid.symmetric:
        plain = x.abs().amax(1, keepdim=True) * float(np.float32(2 / grid.levels))
        zeros = torch.full_like(plain, half)
        scales = to_fp16(plain) if weights is None else _shrunk(x, weights, plain, zeros, grid.levels, SHRINKS)
        return scales, zeros.byte()
    if weights is not None:
        scale, offset = _offset_scales(x, weights, grid.levels)
        best = scale.clamp(min=1e-12)
        zeros = (-offset * inverse(best)).round().clamp(grid.min_zero, grid.levels)
        return _shrunk(x, weights, best, zeros, grid.levels, SHRINKS[:9]), zeros.byte()
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scales = to_fp16((high - low) / torch.full_like(high, grid.levels))
    zeros = (-low * inverse(scales.float())).round().clamp(grid.min_zero, grid.levels)
    return scales, zeros.byte()


def _shrunk(
    x: Tensor, weights: Tensor, widest: Tensor, zeros: Tensor, levels: int, shrinks: NDArray[np.float32]
) -> Tensor:
    """`search.shrunk_scales`: the best of the scales shrink * widest [groups, 1]"""
    candidates = torch.from_numpy(shrinks).to(x.device)
    rows = max(SEARCHED_VALUES // (len(shrinks) * x.shape[1]), 1)
    chosen = []
    for first in range(0, len(x), rows):
        span = slice(first, first + rows)
        stored = to_fp16(widest[span] * candidates)  # [groups, candidates]
        scale, zero, w = stored.float()[..., None], zeros[span][..., None], x[span, None]
        error = (w * inverse(scale) + zero).round_().clamp_(0, levels).sub_(zero).mul_(scale).sub_(w)
        counted = weights[span, None] if len(weights) > 1 else weights[None]
        best = error.square_().mul_(counted).sum(2).argmin(1, keepdim=True)
        chosen.append(stored.gather(1, best))
    return torch.cat(chosen)


def _offset_scales(x: Tensor, weights: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """`search.offset_scales`, with offsets of at most 0: scales and offsets [groups, 1]"""
    weights = weights.expand_as(x)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True)
    scales, offsets = (high - low) / levels, low
    over, weighted = inverse(high - low), weights * x
    sum_w, sum_x = weights.sum(1, keepdim=True), weighted.sum(1, keepdim=True)
    best: Tensor | None = None
    for factor in offset_factors(levels).tolist():
        q = ((x - low) * (factor * over)).round_().clamp_(0, levels)
        counted = weights * q
        sum_xq, sum_q = (weighted * q).sum(1, keepdim=True), counted.sum(1, keepdim=True)
        sum_qq = counted.mul_(q).sum(1, keepdim=True)
        scale, offset = scales, offsets
        if best is not None:
            determinant = inverse(sum_w * sum_qq - sum_q * sum_q)
            scale = (sum_w * sum_xq - sum_x * sum_q) * determinant
            offset = (sum_qq * sum_x - sum_q * sum_xq) * determinant
            scale = torch.where(offset > 0, sum_xq * inverse(sum_qq), scale)
            offset = offset.clamp(max=0)
        loss = scale * scale * sum_qq + offset * offset * sum_w
        loss = loss + 2 * (scale * offset * sum_q - scale * sum_xq - offset * sum_x)
        if best is None:
            best = loss
            continue
        better = (loss < best) & (scale > 0)
        best, scales, offsets = (
            torch.where(better, new, old) for new, old in ((loss, best), (scale, scales), (offset, offsets))
        )
    return scales, offsets


def to_nearest(w: Tensor, grid: IntegerGrid, importance: Tensor | None) -> TorchIntegers:
    """`integers.to_nearest`"""
    size = grid.group_of(w.shape[1])
    x = w.reshape(-1, size)
    weights = None
    if importance is not None:
        counted = importance / importance.mean().clamp(min=1e-30) + 1e-6
        weights = counted.expand_as(w).reshape(-1, size)
    scales, zeros = ranges(x, grid, weights)
    q = (x * inverse(scales.float())).add_(zeros.float()).round_().clamp_(0, grid.levels).byte()
    return TorchIntegers.of(grid.bits, q.view_as(w), scales.view(len(w), -1), zeros.view(len(w), -1))

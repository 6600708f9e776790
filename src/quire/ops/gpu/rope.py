# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The angles of RoPE, once a step, in one kernel. Specification: ops/reference/rope.py."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.reference.rope import Frequencies


def rope_angles(positions: Tensor, frequencies: Frequencies) -> Tensor:
    """positions [T] -> [T, rotary_dim]: cos of position * frequency, then sin."""
    half = len(frequencies.inv_freq)
    assert positions.is_contiguous() and frequencies.inv_freq.is_contiguous()
    angles = frequencies.inv_freq.new_empty(len(positions), 2 * half)
    if len(positions):
        _rope_angles[(len(positions),)](
            positions, frequencies.inv_freq, angles, frequencies.scale, half, BLOCK=next_power_of_two(half), num_warps=1
        )
    return angles


@triton.jit
def _rope_angles(positions, inv_freq, angles, scale, half, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + column, mask=inside, other=0.0)
    row = angles + token * 2 * half + column
    tl.store(row, tl.cos(angle) * scale, mask=inside)
    tl.store(row + half, tl.sin(angle) * scale, mask=inside)

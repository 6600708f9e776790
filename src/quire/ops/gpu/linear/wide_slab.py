# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""A slab, which is 64 inputs of a tile of activations, times the weights of grouped_wide.py and moe/quantized_tiles.py.

64 inputs are 128 bytes of a row of activations, in shared memory without bank conflicts."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.gpu.linear.wide_planes import side_by_side, unpack_piece, words_layout
from quire.ops.gpu.linear.wide_scales import append

SLAB = 64


def slabs_descriptor(x: Tensor, block_m: int, slabs: int) -> TensorDescriptor:
    """Of x [M, K] as [K / 64, M, 64]"""
    M, K = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(x, [K // SLAB, M, SLAB], [SLAB, K, 1], [slabs, block_m, SLAB], layout)


@gluon.jit
def load_words(ptrs, chunk, PARTS: gl.constexpr, STEP: gl.constexpr):
    """The words of a span's chunks, which are STEP words apart."""
    words = ()
    for part in gl.static_range(PARTS):
        words = append(words, gl.load(ptrs + (chunk * PARTS + part) * STEP))
    return words


@gluon.jit
def multiply_slab(
    acc,
    x_slabs,  # [stages * slabs of a copy, tokens, 64] in shared memory
    arrived,  # one barrier a stage
    copy,  # the number of the slab's copy
    halves,
    high,
    pair_lines,
    other_lines,
    buffer,
    NUMBER: gl.constexpr,  # of the slab in its span
    BITS: gl.constexpr,
    HIGH: gl.constexpr,
    WIDTH: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    ITEMS: gl.constexpr,
    HALF_COUNT: gl.constexpr,
    STAGES: gl.constexpr,
    COPIES: gl.constexpr,
    WARPS: gl.constexpr,
    UNPACK: gl.constexpr,
    OPERANDS: gl.constexpr,
    RESTS: gl.constexpr = True,
):
    """acc [outputs, tokens] and two more products, which are in flight."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, words_layout(acc.shape[0], WARPS, WIDTH))
    PIECES: gl.constexpr = 32 // WIDTH  # of 64 inputs: two planes each
    slot = copy % STAGES
    planes = ()
    for piece in gl.static_range(PIECES):
        planes = planes + unpack_piece(
            halves, high, pair_lines, other_lines, buffer, NUMBER * PIECES + piece,
            BITS, HIGH, WIDTH, SECOND, GROUP, ITEMS, HALF_COUNT, ROWS, UNPACK, OPERANDS, RESTS,
        )  # fmt: skip
    if NUMBER % COPIES == 0:
        mbarrier.wait(arrived.index(slot), (copy // STAGES) & 1)
    x = x_slabs.index(slot * COPIES + NUMBER % COPIES).permute((1, 0))
    for plane in gl.static_range(2):  # 32 inputs each
        w = planes[plane] if WIDTH == 32 else side_by_side(planes[plane * 2], planes[plane * 2 + 1])
        w = gl.convert_layout(w, OPERAND, assert_trivial=True)
        acc = warpgroup_mma(w, x.slice(plane * 32, 32, 0), acc, is_async=True)
    return acc

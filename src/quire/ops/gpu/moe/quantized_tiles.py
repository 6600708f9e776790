# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Grouped GEMMs of experts quantized in groups, for many routes on Hopper: the kernel of linear/grouped_wide.py, with
tiles of routes in place of tiles of rows.

Rows of x are in the order of the tiles (gathering.py), so tiles are copied by the TMA unit. Gate and up are in one
tile: of 16 rows of weights, eight are of gate and eight of up, so that both sums of an output are in one thread. Sums
have another order than those of quantized.py, so it is not for `batch_invariant`."""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.wide_format import high_bits, scale_words, slab_format
from quire.ops.gpu.linear.wide_slab import SLAB, slabs_descriptor
from quire.ops.gpu.linear.wide_unpack import operands, unpack_pieces
from quire.ops.gpu.moe.quantized import QuantizedExperts
from quire.ops.gpu.moe.quantized_config import WideTile
from quire.ops.gpu.moe.quantized_tile import multiply_tile
from quire.ops.gpu.moe.sorting import RoutedTokens, find_tile
from quire.ops.gpu.overlap import overlap_options


def wide_expert_gemm(
    x: Tensor,
    experts: QuantizedExperts,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routed: RoutedTokens,
    config: WideTile,
    activation: int = -1,
    limit: float = 0.0,
    overlap: bool = False,
) -> None:
    """x [tiles * block, K], in the order of the tiles. With an activation: -> out [tiles * block, N], gate and up, in
    the same order. Without: -> out [routes, N], times the routes' weights."""
    w, N, K = experts.rows, out.shape[1], x.shape[1]
    form = slab_format(w)
    assert form is not None and w.num_inputs == K
    assert x.is_contiguous() and out.is_contiguous() and expert_weights.is_contiguous()
    fewer = w.bits == 8 and config.block_m <= 64  # there are registers for no more
    most = form.parts if w.super_scales is not None else config.parts  # there is a super-scale for each 256 inputs
    parts = 1 if fewer else min(form.parts, most)
    second = form.kind if form.kind == "exponents" else form.second
    span = w.chunk * parts
    tail = K % span // SLAB
    num_tiles = len(routed.tile_experts)
    columns = triton.cdiv(N * (2 if activation >= 0 else 1), config.block_n)
    _wide_experts_kernel[(num_tiles * columns,)](
        slabs_descriptor(x, config.block_m, config.slabs),
        slabs_descriptor(x, config.block_m // 2, config.slabs) if config.halves else None,
        w.words,
        w.high,
        scale_words(w),
        w.offsets,
        w.super_scales,
        biases,
        expert_weights,
        out,
        routed.routes,
        routed.tile_experts,
        num_tiles,
        columns,
        routed.num_routes,
        experts.num_experts,
        w.num_outputs // experts.num_experts,
        w.num_outputs,
        N,
        K // span,
        w.num_chunks,
        ACTIVATION=activation,
        LIMIT=limit,
        BITS=w.bits,
        HIGH=high_bits(w),
        WIDTH=w.width,
        PARTS=parts,
        TAIL=tail,
        KIND=form.kind,
        SECOND=form.second,
        GROUP=form.group,
        OFFSET_SCALES=form.offset_scales,
        RESTS=form.kind != "exponents",
        STAGES=config.stages,
        COPIES=config.slabs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILES_A_GROUP=config.group,
        WARPS=config.warps,
        OVERLAP=overlap,
        UNPACK=unpack_pieces(w.bits, high_bits(w), form.zero, second),
        OPERANDS=operands(high_bits(w), second),
        num_warps=config.warps,
        **overlap_options(overlap),
        **({"maxnreg": config.registers} if config.registers else {}),
    )


NOT_SPECIALIZED = ["num_tiles", "columns", "num_routes", "num_experts", "expert_outputs", "all_outputs"]


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "spans", "chunks"])
def _wide_experts_kernel(
    x_desc,
    x_half_desc,
    words_ptr,
    high_ptr,
    scales_ptr,
    offsets_ptr,
    super_ptr,
    bias_ptr,
    expert_weight_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_tiles,
    columns,
    num_routes,
    num_experts,
    expert_outputs,
    all_outputs,
    N,
    spans,
    chunks,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    BITS: gl.constexpr,
    HIGH: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    OFFSET_SCALES: gl.constexpr,
    RESTS: gl.constexpr,
    STAGES: gl.constexpr,
    COPIES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES_A_GROUP: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    UNPACK: gl.constexpr,
    OPERANDS: gl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile, column = find_tile(gl.program_id(0), num_tiles, columns, TILES_A_GROUP)
    expert = gl.load(tile_expert_ptr + tile)
    if (expert >= 0) & (expert < num_experts):
        weight = (words_ptr, high_ptr, scales_ptr, offsets_ptr, super_ptr, all_outputs, spans, chunks)
        to = (bias_ptr, expert_weight_ptr, out_ptr, route_ptr, num_routes, N)
        first_row = expert.to(gl.int64) * expert_outputs
        slot = tile * BLOCK_M
        if x_half_desc is None:
            multiply_tile(
                x_desc, weight, to, slot, first_row, column, ACTIVATION, LIMIT, BITS, HIGH, WIDTH, PARTS, TAIL, KIND,
                SECOND, GROUP, OFFSET_SCALES, RESTS, STAGES, COPIES, BLOCK_M, BLOCK_N, WARPS, UNPACK, OPERANDS,
            )  # fmt: skip
        else:
            if gl.load(route_ptr + slot + BLOCK_M // 2) < num_routes:
                multiply_tile(
                    x_desc, weight, to, slot, first_row, column, ACTIVATION, LIMIT, BITS, HIGH, WIDTH, PARTS, TAIL,
                    KIND, SECOND, GROUP, OFFSET_SCALES, RESTS, STAGES, COPIES, BLOCK_M, BLOCK_N, WARPS, UNPACK,
                    OPERANDS,
                )  # fmt: skip
            else:
                multiply_tile(
                    x_half_desc, weight, to, slot, first_row, column, ACTIVATION, LIMIT, BITS, HIGH, WIDTH, PARTS,
                    TAIL, KIND, SECOND, GROUP, OFFSET_SCALES, RESTS, STAGES, COPIES, BLOCK_M // 2, BLOCK_N, WARPS,
                    UNPACK, OPERANDS,
                )  # fmt: skip

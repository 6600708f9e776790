# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for 4-bit weights in groups and fp8 activations, a scale for each token (W4A8).

The integers -8 .. 7 are exact in fp8 (e4m3), so values go into the tensor cores as they are, at twice the rate of 16
bits, and a group's scale is applied to its sums in fp32: no weight is rounded. Eight values of a word become fp8 at a
time: of four neighbouring words, the lower halves of the bytes of word i have the values of plane 2 i, the upper halves
those of plane 2 i + 1, and so no byte changes its lane (`shuffle_words`). On Hopper, many rows go in wider tiles
(w4a8_wide.py). One row goes without tensor cores (w4a8_gemv.py)."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.grouped_config import MAX_PARALLEL_ROWS, GroupedConfig, Tile, best_splits
from quire.ops.gpu.linear.grouped_layout import GroupedArgs, GroupedWeight, pack_int4
from quire.ops.gpu.linear.grouped_scales import append, load_scales, scale_of
from quire.ops.gpu.linear.linear import num_splits
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.split_k import finish, rounded_product, split_launch
from quire.ops.gpu.linear.tile_times import TileTime, fastest
from quire.ops.gpu.linear.unpack import take_planes
from quire.ops.gpu.linear.w4a8_gemv import can_gemv_shuffled, w4a8_gemv
from quire.ops.gpu.linear.w4a8_instructions import UNIT, fp8_instructions
from quire.ops.gpu.linear.w4a8_wide_config import wide_config_of
from quire.ops.gpu.overlap import overlap_options, prefetch, wait_for_inputs

MIN_WIDTH = 32  # words of a chunk: a tensor core takes 32 inputs in fp8 at least
MAX_RUN = 128  # inputs whose products Hopper adds up with some 14 bits
# By the most rows; beyond them, the faster of two.
TILES = {16: Tile(16, 64, 4, 4, 4), 32: Tile(32, 64, 4, 3, 3), 64: Tile(64, 64, 4, 3, 3)}
LARGE_TILES = {
    Tile(128, 128, 8, 3, 1): TileTime(128, 128, 1, 2, 1.33, (0, 5, 7, 10)),
    TILES[64]: TileTime(64, 64, 3, 2, 0.45, (0, 3, 5, 8), 0.62),
}


@dataclass(frozen=True, slots=True, eq=False)
class W4A8Weight:
    """A weight of 4 bits whose words are shuffled: only the kernel of this file takes them."""

    shuffled: GroupedWeight

    @property
    def num_outputs(self) -> int:
        return self.shuffled.num_outputs

    @property
    def nbytes(self) -> int:
        return self.shuffled.nbytes


def pack_w4a8(q: Tensor, scales: Tensor) -> W4A8Weight:
    """q [N, K] uint8 of 0 .. 15, which stand for -8 .. 7; scales [N, K / group]"""
    return shuffle_words(pack_int4(q, scales, zero=8, width=MIN_WIDTH))


def can_shuffle(weight: GroupedWeight) -> bool:
    """Symmetric integers of four bits."""
    symmetric = weight.bits == 4 and weight.zero == 8 and not weight.has_offsets and weight.high is None
    return symmetric and not weight.codebook and weight.width >= MIN_WIDTH and weight.super_scales is None


def shuffle_words(weight: GroupedWeight) -> W4A8Weight:
    assert can_shuffle(weight)
    quads = weight.words.unflatten(2, (-1, 4))  # [N, chunks, width / 4, words]
    shuffled = torch.zeros_like(quads)
    for plane in range(8):
        for word in range(4):
            value = quads[..., word] >> 4 * plane & 15
            shuffled[..., plane // 2] |= value << 8 * word + 4 * (plane % 2)
    return W4A8Weight(replace(weight, words=shuffled.flatten(2)))


def w4a8_linear(
    x: QuantizedRows,
    weight: W4A8Weight,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch_invariant: bool = False,
    tickets: Tensor | None = None,
    overlap: bool = False,
    all_outputs: int | None = None,
) -> Tensor:
    """x [M, K] fp8 with a scale a row -> [M, N] in `dtype`. `all_outputs`: as in `linear`."""
    if len(x.q) == 0:
        return x.q.new_empty(0, weight.num_outputs, dtype=dtype)
    if len(x.q) == 1 and not batch_invariant and can_gemv_shuffled(weight.shuffled):
        return w4a8_gemv(x, weight.shuffled, bias, dtype, overlap)
    if bias is None and not batch_invariant and (wide := wide_config_of(x, weight.shuffled, dtype, LARGE_TILES)):
        from quire.ops.gpu.linear.w4a8_wide import w4a8_wide_kernel  # Gluon is not in every Triton

        return w4a8_wide_kernel(x, weight.shuffled, dtype, wide, tickets, overlap)
    config = w4a8_config(len(x.q), weight, batch_invariant, all_outputs)
    return w4a8_kernel(x, weight, bias, dtype, config, tickets, overlap)


def w4a8_config(
    M: int, weight: W4A8Weight, batch_invariant: bool = False, all_outputs: int | None = None
) -> GroupedConfig:
    """Batch invariant: the inner sum is cut by (outputs, inputs) alone."""
    N, K = weight.num_outputs, weight.shuffled.num_inputs
    if max(TILES) < M:
        _, tile, splits = fastest(LARGE_TILES, M, N, K)
    else:
        tile = next(tile for most, tile in TILES.items() if most >= M)
        programs = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
        splits = best_splits(programs, weight.shuffled.num_chunks, tile.resident)
    serial = batch_invariant and M > MAX_PARALLEL_ROWS
    splits = num_splits(all_outputs or N, K) if batch_invariant else splits
    return GroupedConfig(tile.block_m, tile.block_n, splits, serial, tile.warps, tile.stages, tile.registers)


def w4a8_kernel(
    x: QuantizedRows,
    weight: W4A8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: GroupedConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    w = weight.shuffled
    (M, K), N = x.q.shape, w.num_outputs
    assert w.num_inputs == K and x.q.is_contiguous() and x.q.dtype == torch.float8_e4m3fn and x.scales.shape == (M, 1)
    out = torch.empty(M, N, dtype=dtype, device=x.q.device)
    launch = split_launch(config, out, bias, tickets)
    _w4a8_kernel[launch.grid](
        x.q,
        x.scales,
        GroupedArgs(w.words, None, w.scales, None, None, None),
        launch.to,
        M,
        N,
        K,
        w.num_chunks,
        WHOLE_CHUNKS=K % w.chunk == 0,
        GROUP=w.group,
        WIDTH=w.width,
        ASM="" if triton.knobs.runtime.interpret else TO_FP8,
        OVERLAP=overlap,
        **config.launch_options,
        **launch.constants,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _w4a8_kernel(
    x_ptr,
    x_scale_ptr,
    weight,  # GroupedArgs
    to,  # OutputArgs
    M,
    N,
    K,
    chunks,
    WHOLE_CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(outputs, N - 1).to(tl.int64)  # outputs past the end are computed and never stored
    columns = tl.arange(0, WIDTH)
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * K
    present = (tokens < M)[None, :]
    split_chunks = tl.cdiv(chunks, SPLITS)
    TURNS: tl.constexpr = SPLITS // SHARES
    RUN: tl.constexpr = min(GROUP, MAX_RUN_INPUTS)
    RUNS: tl.constexpr = 8 * WIDTH // RUN  # of a chunk, each summed up by itself
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 1)
    if OVERLAP:
        first_chunk = tl.minimum(tl.program_id(1) * TURNS * split_chunks, chunks - 1)
        prefetch(weight.words + (rows * chunks + first_chunk)[:, None] * WIDTH + tl.arange(0, 2)[None, :] * 32)
    wait_for_inputs(OVERLAP)

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for turn in range(TURNS):
        first = (tl.program_id(1) * TURNS + turn) * split_chunks
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for chunk in tl.range(first, tl.minimum(first + split_chunks, chunks), num_stages=STAGES):
            scales = load_scales(weight, chunk, rows, N, GROUP, 8 * WIDTH, False)
            offsets = (rows * chunks + chunk)[:, None] * WIDTH + columns[None, :]
            planes = to_fp8(tl.load(weight.words + offsets, eviction_policy="evict_first"), ASM)
            for number in tl.static_range(RUNS):
                k = (chunk * RUNS + number) * RUN + tl.arange(0, RUN)
                inside = present if WHOLE_CHUNKS else present & (k < K)[:, None]
                x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
                w = take_planes(planes, number * 8 // RUNS, 8 // RUNS)
                sums += tl.dot(w, x) * scale_of(scales, number * GROUPS // RUNS)[:, None]
        x_scales = tl.load(x_scale_ptr + tokens, mask=tokens < M, other=0.0)
        if ASM != "":
            x_scales *= INTEGERS
        total += rounded_product(sums, x_scales[None, :], ASM)  # as where another program adds up the splits
    finish(total, to, outputs, tokens, N, M, SHARES)


MAX_RUN_INPUTS = tl.constexpr(MAX_RUN)
INTEGERS = tl.constexpr(UNIT)


@triton.jit
def to_fp8(words, ASM: tl.constexpr):
    """Shuffled words int32 [n, width] -> eight planes of fp8 [n, width]; with instructions, over UNIT"""
    d = tl.float8e4nv
    if ASM == "":
        quads = tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2))
        even, odd = tl.split(quads)
        of_even, of_odd = tl.split(even), tl.split(odd)
        of_words = (of_even[0], of_odd[0], of_even[1], of_odd[1])
        planes = ()
        for plane in tl.static_range(8):
            of_plane = of_words[plane // 2] >> (plane % 2 * 4)
            pairs = tl.join(
                tl.join(of_plane & 15, of_plane >> 16 & 15), tl.join(of_plane >> 8 & 15, of_plane >> 24 & 15)
            )
            planes = append(planes, (tl.reshape(pairs, words.shape) - 8).to(tl.float32).to(d))
    else:
        planes = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words], (d, d, d, d, d, d, d, d), is_pure=True, pack=4
        )
    return planes


TO_FP8 = fp8_instructions(range(4))

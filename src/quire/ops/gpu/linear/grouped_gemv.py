# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""GEMV, y = w @ x for one row x and weights quantized to 4 bits in groups, in integers.

x comes as 16-bit integers with a scale for every group (quantize_rows.py). One instruction multiplies two of them by
two bytes and adds both to a sum; three instructions make eight bytes of a word of eight values. So a value costs 7/8 of
an instruction, and a group's sum is exact. A warp takes 4 chunks of inputs at a time, 8 lanes a chunk, 4 words a lane.
A lane's part of x serves `block_n / warps` outputs. Sums stay in the lanes until the end."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.grouped_scales import append, as_bytes, byte, fp16_at
from quire.ops.gpu.linear.quantize_rows import PAIRED, QuantizedRows
from quire.ops.gpu.linear.unpack import ZERO_POINTS
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

WIDTH = tl.constexpr(32)  # words of a chunk: PAIRED inputs
CHUNKS = tl.constexpr(4)  # a step
LANES = tl.constexpr(8)  # that share a chunk
WORDS = tl.constexpr(4)  # a lane
HIGH = tl.constexpr(16)  # the upper values of bytes are not shifted down: acc are 16 times too large
MAX_REGISTERS = 128  # of a thread: two programs of 8 warps on a multiprocessor


class GroupedGemvConfig(NamedTuple):
    block_n: int  # outputs a program
    warps: int  # at least 8: a tensor with fewer elements than threads would be loaded when it is used
    depth: int  # steps whose weights are in flight


def can_gemv(weight: GroupedWeight) -> bool:
    """Integers of four bits, with scales and offsets in fp16 or of six bits."""
    if weight.bits != 4 or weight.codebook or weight.high is not None or weight.chunk != PAIRED or weight.group < 32:
        return False
    if weight.super_scales is not None:
        return bool(weight.scales.dtype == torch.int32)
    return weight.offsets is None and weight.scales.dtype in (torch.float16, torch.int32, torch.int64)


def grouped_gemv(
    x: QuantizedRows,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: GroupedGemvConfig,
    dtype: torch.dtype = torch.bfloat16,
    overlap: bool = False,
    shuffled: bool = False,
) -> Tensor:
    """x one row in int16, in groups of `x_group(weight)` -> [1, N]. With `shuffled` words (w4a8_gemv.py), x is so,
    too."""
    N, chunks = weight.num_outputs, weight.num_chunks
    assert len(x.q) == 1 and x.q.shape[1] == chunks * PAIRED and can_gemv(weight)
    assert weight.words.numel() < 2**31  # offsets have 32 bits
    out = torch.empty(1, N, dtype=dtype, device=x.q.device)
    _grouped_gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x.q.view(torch.int32),
        x.scales,
        weight.words,
        _scales(weight),
        weight.super_scales,
        bias,
        out,
        N,
        chunks,
        GROUP=weight.group,
        ZERO=ZERO_POINTS if weight.has_zero_points else weight.zero,
        HAS_OFFSETS=weight.has_offsets,
        SHUFFLED=shuffled,
        BLOCK_N=config.block_n,
        WARPS=config.warps,
        DEPTH=config.depth,
        EVEN=chunks % (CHUNKS.value * config.depth) == 0,
        ONCE=chunks <= CHUNKS.value * config.depth,
        ASM=not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        num_warps=config.warps,
        maxnreg=MAX_REGISTERS,
        **overlap_options(overlap),
    )
    return out


def _scales(weight: GroupedWeight) -> Tensor:
    """Words of six-bit scales, pairs of fp16 (scale and offset) or fp16 and zero point, or fp16."""
    in_pairs = weight.has_offsets or weight.has_zero_points
    return weight.scales.view(torch.int32 if in_pairs else torch.float16)


def x_group(weight: GroupedWeight) -> int:
    """Inputs that share a scale of x: at most those that share a sum."""
    return min(weight.group, PAIRED // 2)


@triton.jit
def _grouped_gemv_kernel(
    pairs_ptr,
    x_scale_ptr,
    words_ptr,
    scale_ptr,
    super_scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    chunks,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SHUFFLED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # A warp takes every WARPS-th row of the tile. They are neighbouring outputs, so that their scales lie side by side.
    row = tl.arange(0, BLOCK_N)
    outputs = tl.program_id(0) * BLOCK_N + row % WARPS * (BLOCK_N // WARPS) + row // WARPS
    rows = tl.minimum(outputs, N - 1)[:, None]  # outputs past the end are computed and never stored
    loaded = ()
    for d in tl.static_range(DEPTH):
        step = _load(words_ptr, scale_ptr, super_scale_ptr, rows, d * CHUNKS, N, chunks, GROUP, EVEN)
        loaded = append(loaded, step)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros((BLOCK_N, CHUNKS * LANES), tl.float32)
    for begin in range(0, chunks, CHUNKS * DEPTH):
        prefetched = ()
        for d in tl.static_range(DEPTH):
            first = begin + d * CHUNKS
            acc = _add_step(
                acc, loaded[d], pairs_ptr, x_scale_ptr, first, chunks, GROUP, ZERO, HAS_OFFSETS, SHUFFLED, EVEN, ASM
            )
            if not ONCE:
                first += CHUNKS * DEPTH
                step = _load(words_ptr, scale_ptr, super_scale_ptr, rows, first, N, chunks, GROUP, False)
                prefetched = append(prefetched, step)
        if not ONCE:
            loaded = prefetched
    y = tl.sum(acc, axis=1) * (1.0 / HIGH)
    inside = outputs < N
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load(words_ptr, scale_ptr, super_scale_ptr, rows, first, N, chunks, GROUP: tl.constexpr, EXIST: tl.constexpr):
    """Words of chunks first .. first + CHUNKS, [n, CHUNKS * WIDTH], and for every group of a chunk the scales,
    [n, CHUNKS * LANES]; or three words with those of all groups, and their super-scales. Past the last chunk words
    are anything and their scales are 0. EXIST: no chunk is past the last."""
    column = tl.arange(0, CHUNKS * WIDTH)[None, :]
    inside = None if EXIST else column // WIDTH + first < chunks
    words = tl.load(words_ptr + rows * (chunks * WIDTH) + (first * WIDTH + column), mask=inside)
    scales = ()
    if super_scale_ptr is not None:
        for word in tl.static_range(3):
            scales = append(scales, _load_one(scale_ptr, 3 * rows + word, first, 3 * N, 1, chunks, EXIST))
        scales = append(scales, _load_one(super_scale_ptr, rows, first, N, 1, chunks, EXIST))
    elif GROUP >= 8 * WIDTH:
        both = _load_one(scale_ptr, rows, first, N, GROUP // (8 * WIDTH), chunks, EXIST)
        scales = append(append(scales, both), both)
    else:
        GROUPS: tl.constexpr = 8 * WIDTH // GROUP
        for pair in tl.static_range(GROUPS // 2):
            scales = scales + _load_two(scale_ptr, rows * GROUPS + 2 * pair, first, GROUPS * N, chunks, EXIST)
    return words, scales


@triton.jit
def _load_one(ptr, rows, first, stride, SHARED: tl.constexpr, chunks, EXIST: tl.constexpr):
    """A number for all lanes of a chunk, and of SHARED neighbouring chunks: [n, CHUNKS * LANES]"""
    chunk = tl.arange(0, CHUNKS * LANES)[None, :] // LANES + first
    # The hint is untrue, but it gives rows to the warps that have their words.
    offsets = tl.max_contiguous(rows + chunk // SHARED * stride, (1, 2))
    return tl.load(ptr + offsets, mask=None if EXIST else chunk < chunks, other=None if EXIST else 0)


@triton.jit
def _load_two(ptr, rows, first, stride, chunks, EXIST: tl.constexpr):
    """Two neighbouring numbers for all lanes of a chunk: [n, CHUNKS * LANES] twice"""
    lane_word = tl.arange(0, 2 * CHUNKS * LANES)[None, :]
    chunk = lane_word // (2 * LANES) + first
    offsets = rows + (chunk * stride + lane_word % 2)
    two = tl.load(ptr + offsets, mask=None if EXIST else chunk < chunks, other=None if EXIST else 0)
    return tl.split(tl.reshape(two, (rows.shape[0], CHUNKS * LANES, 2)))


@triton.jit
def _add_step(
    acc,
    loaded,
    pairs_ptr,
    x_scale_ptr,
    first,
    chunks,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SHUFFLED: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
):
    words, scales = loaded
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 2)  # of x, a chunk
    lane_word = tl.arange(0, CHUNKS * WIDTH)
    chunk = lane_word // WIDTH + first
    chunk = chunk if EVEN else tl.minimum(chunk, chunks - 1)
    x = ()
    for kind in tl.static_range(4):
        x = append(x, quarters(tl.load(pairs_ptr + chunk * (4 * WIDTH) + kind * WIDTH + lane_word % WIDTH)[None, :]))
    low = quarters(words & 0x0F0F0F0F)
    high = quarters(words & ~0x0F0F0F0F)  # values times HIGH
    SUPER_SCALED: tl.constexpr = len(scales) < GROUPS
    if SUPER_SCALED:
        super_scale = scales[3]
        scales = as_bytes(scales[:3])
    scaled, below = tl.zeros_like(acc), tl.zeros_like(acc)
    for pair in tl.static_range(GROUPS // 2):
        # WORDS numbers a lane: the scale and the sum of x of a group, and of the next group
        x_scales = quarters(tl.load(x_scale_ptr + (chunk * GROUPS + 2 * pair) * 2 + lane_word % 4)[None, :])
        for second in tl.static_range(2):
            if SHUFFLED:
                total = _shuffled_dot(x, low, high, second, ASM)
            else:
                total = _group_dot(x, low, high, 2 * pair + second, GROUPS, ASM)
            part = total.to(tl.float32) * x_scales[2 * second]
            x_sum = x_scales[2 * second + 1] * (HIGH / LANES)
            if SUPER_SCALED:
                scaled += part * byte(scales[pair // 2], pair % 2 * 2 + second)
                below += x_sum * byte(scales[2 + pair // 2], pair % 2 * 2 + second)
            elif HAS_OFFSETS:
                acc += part * fp16_at(scales[2 * pair + second], 0)
                acc += x_sum * fp16_at(scales[2 * pair + second], 16)
            elif ZERO < 0:
                word = scales[2 * pair + second]
                acc += (part - byte(word, 2) * x_sum) * fp16_at(word, 0)
            else:
                acc += (part - ZERO * x_sum) * scales[2 * pair + second].to(tl.float32)
    if SUPER_SCALED:
        acc += scaled * fp16_at(super_scale, 0) - below * fp16_at(super_scale, 16)
    return acc


@triton.jit
def quarters(x):
    """[n, 4 m] -> the first of every four, the second, the third and the fourth, [n, m] each: a lane has them all"""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    first, third = tl.split(tl.reshape(even, (x.shape[0], x.shape[1] // 4, 2)))
    second, fourth = tl.split(tl.reshape(odd, (x.shape[0], x.shape[1] // 4, 2)))
    return first, second, third, fourth


@triton.jit
def _group_dot(x, low, high, NUMBER: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
    """HIGH times the dot product of x and the group's part of the words: two bytes of each word, a byte, or half of
    one."""
    UPPER: tl.constexpr = NUMBER * 2 // GROUPS
    SECOND: tl.constexpr = NUMBER * 4 // GROUPS % 2
    MASK: tl.constexpr = -1 if GROUPS == 2 else (-65536 if SECOND == 1 else 0xFFFF)
    of_low, of_high = None, None
    for w in tl.static_range(WORDS):
        if GROUPS < 8 or NUMBER % 2 == 0:
            of_low = dot2(x[UPPER][w] & MASK, low[w], of_low, UPPER == 1, ASM)
        if GROUPS < 8 or NUMBER % 2 == 1:
            of_high = dot2(x[2 + UPPER][w] & MASK, high[w], of_high, UPPER == 1, ASM)
    total = of_high
    if of_low is not None:
        total = of_low * HIGH if of_high is None else of_low * HIGH + of_high
    return total


@triton.jit
def _shuffled_dot(x, low, high, NUMBER: tl.constexpr, ASM: tl.constexpr):
    """The same of half a chunk, of words that `shuffle_words` made: two words of a lane have its planes."""
    of_low, of_high = None, None
    for w in tl.static_range(WORDS):
        of_low = dot2(x[2 * NUMBER][w], low[2 * NUMBER + w // 2], of_low, w % 2 == 1, ASM)
        of_high = dot2(x[2 * NUMBER + 1][w], high[2 * NUMBER + w // 2], of_high, w % 2 == 1, ASM)
    return of_low * HIGH + of_high


@triton.jit
def dot2(x, words, total, UPPER: tl.constexpr, ASM: tl.constexpr):
    """total (None: 0) + the two 16-bit integers of x times two bytes of the words, the lower or the upper ones"""
    HALF: tl.constexpr = "hi" if UPPER else "lo"
    SHIFT: tl.constexpr = 16 if UPPER else 0
    if not ASM:
        both = ((x << 16) >> 16) * ((words >> SHIFT) & 255) + (x >> 16) * ((words >> (SHIFT + 8)) & 255)
        total = both if total is None else total + both
    elif total is None:
        total = tl.inline_asm_elementwise(
            "dp2a." + HALF + ".s32.u32 $0, $1, $2, 0;", "=r,r,r", [x, words], tl.int32, is_pure=True, pack=1
        )
    else:
        total = tl.inline_asm_elementwise(
            "dp2a." + HALF + ".s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [x, words, total], tl.int32, is_pure=True, pack=1
        )
    return total

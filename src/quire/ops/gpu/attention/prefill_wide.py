# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741, RUF005 (l is the running sum of an online softmax; Triton adds tuples, and does not unpack them)
"""Attention of prompts as in prefill.py, on Hopper: warps with different tasks.

One warp copies pages of K and V by the TMA unit, some tiles of keys ahead. Two times four warps attend, each for half
of the rows. While the tensor cores multiply the weights of a tile by its values, and the next queries by keys, a group
computes the softmax in between; so does the other group, and no barrier is for both."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.gpu.attention.pages import Pages, Runs, Scoring, head_args
from quire.ops.gpu.attention.plan import PrefillPlan, find_sequence
from quire.ops.gpu.attention.prefill_wide_config import ROUND, ROWS
from quire.ops.gpu.attention.tile import EXP2_SCALE, FINITE_MIN

WARPS = 4  # that attend together
ATTEND_REGISTERS, COPY_REGISTERS = gl.constexpr(240), gl.constexpr(24)  # of a thread
HALF_ROWS = gl.constexpr(64)


def wide_prefill(
    q: Tensor,
    pages: Pages,
    runs: Runs,
    plan: PrefillPlan,
    scoring: Scoring,
    out: Tensor,
) -> Tensor:
    """As `prefill`."""
    _, num_heads, head_dim = q.shape
    group = num_heads // pages.num_kv_heads
    assert q.stride(2) == 1 and group * pages.num_kv_heads == num_heads and head_dim == pages.head_dim
    assert plan.tile == ROWS // group
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    block = [pages.block_size, 64]
    k, v = (TensorDescriptor.from_tensor(x.flatten(0, 1).flatten(1), block, layout) for x in (pages.k, pages.v))
    score = scoring.args()
    _wide_prefill_kernel[(pages.num_kv_heads, plan.max_tiles)](
        head_args(q),
        head_args(out),
        k,
        v,
        runs.args(),
        plan.starts,
        score.sinks,
        runs.num_seqs,
        score.qk_scale,
        GROUP=group,
        TILE=plan.tile,
        BLOCK_SIZE=pages.block_size,
        BLOCK_N=ROUND,
        D=head_dim,
        STAGES=2,
        num_warps=WARPS,
    )
    return out


@gluon.jit(do_not_specialize=["num_seqs"])
def _wide_prefill_kernel(
    q,  # HeadArgs
    out,  # HeadArgs
    k_desc,
    v_desc,
    runs,  # RunArgs
    starts,  # [S + 1] the first tile of each sequence
    sinks,
    num_seqs,
    qk_scale,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    kv_head = gl.program_id(0)
    piece = gl.program_id(1)
    if piece >= gl.load(starts + num_seqs):
        return
    seq = find_sequence(starts, num_seqs, piece)
    tile = gl.load(starts + seq + 1) - 1 - piece  # the last tile, which sees the most, first
    token = gl.load(runs.seq_starts + seq)
    num_queries = gl.load(runs.seq_starts + seq + 1) - token
    context_len = gl.load(runs.context_lens + seq)
    first = context_len - num_queries + tile * TILE  # the position of the first query
    num_tiles = gl.cdiv(gl.minimum(first + TILE, context_len), BLOCK_N)  # of keys
    num_full = gl.minimum((first + 1) // BLOCK_N, num_tiles)  # that all rows see
    num_rows = gl.minimum(num_queries - tile * TILE, TILE) * GROUP

    TYPE: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = k_desc.layout
    queries = gl.allocate_shared_memory(TYPE, [2, HALF_ROWS, D], LAYOUT)
    keys = gl.allocate_shared_memory(TYPE, [STAGES, BLOCK_N, D], LAYOUT)
    values = gl.allocate_shared_memory(TYPE, [STAGES, BLOCK_N, D], LAYOUT)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(full_k.index(number), count=1)
        mbarrier.init(full_v.index(number), count=1)
        mbarrier.init(empty_k.index(number), count=2)
        mbarrier.init(empty_v.index(number), count=2)

    slots = (queries, keys, values, full_k, full_v, empty_k, empty_v)
    where = (kv_head, token + tile * TILE, first, num_rows, num_full, num_tiles, context_len)
    sizes: gl.constexpr = (GROUP, BLOCK_SIZE, BLOCK_N, D, STAGES)
    table = runs.block_tables + seq.to(gl.int64) * runs.table_stride
    to = (q.ptr, q.token, q.head, out.ptr, out.token, out.head, sinks, qk_scale)
    gl.warp_specialize(
        [
            (_attend, (0, slots, to, where, sizes)),
            (_attend, (1, slots, to, where, sizes)),
            (_copy, (k_desc, v_desc, slots, table, where, sizes)),
        ],
        [4, 1],
        [ATTEND_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _copy_tile(desc, blocks, column, full, pages, slot, sizes: gl.constexpr):
    """The pages of a tile: in halves of 64 columns, as the tensor cores read them."""
    BLOCK_SIZE: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[3]
    PER_TILE: gl.constexpr = sizes[2] // BLOCK_SIZE
    place = full.index(slot)
    mbarrier.expect(place, sizes[2] * D * 2)
    for half in gl.static_range(D // 64):
        for number in gl.static_range(PER_TILE):
            tma.async_copy_global_to_shared(
                desc,
                [blocks[number] * BLOCK_SIZE, column + half * 64],
                place,
                pages.index((slot * (D // 64) + half) * PER_TILE + number),
            )


@gluon.jit
def _copy(k_desc, v_desc, slots, table, where, sizes: gl.constexpr):
    _, keys, values, full_k, full_v, empty_k, empty_v = slots
    kv_head, _, _, _, _, num_tiles, context_len = where
    BLOCK_SIZE: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    D: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    PER_TILE: gl.constexpr = BLOCK_N // BLOCK_SIZE
    SHAPE: gl.constexpr = [STAGES * (D // 64) * PER_TILE, BLOCK_SIZE, 64]
    k_pages = keys._reinterpret(k_desc.dtype, SHAPE, k_desc.layout)
    v_pages = values._reinterpret(k_desc.dtype, SHAPE, k_desc.layout)
    last_block = (context_len - 1) // BLOCK_SIZE
    for number in range(num_tiles):
        blocks = ()
        for page in gl.static_range(PER_TILE):  # a block past the context's last is another of its blocks
            block = gl.load(table + gl.minimum(number * PER_TILE + page, last_block))
            blocks = blocks + (block,)  # type: ignore[assignment]
        slot = number % STAGES
        parity = (number // STAGES & 1) ^ 1
        mbarrier.wait(empty_k.index(slot), parity)
        _copy_tile(k_desc, blocks, kv_head * D, full_k, k_pages, slot, sizes)
        mbarrier.wait(empty_v.index(slot), parity)
        _copy_tile(v_desc, blocks, kv_head * D, full_v, v_pages, slot, sizes)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _clear_past(values, full_v, number, context_len, sizes: gl.constexpr):
    """Zeros for values of a tile whose positions are not there: a weight of 0 times what memory holds may be NaN."""
    if (number + 1) * sizes[2] > context_len:
        slot = number % sizes[4]
        mbarrier.wait(full_v.index(slot), number // sizes[4] & 1)
        _clear(values, slot, context_len - number * sizes[2], sizes)


@gluon.jit
def _clear(values, slot, kept, sizes: gl.constexpr):
    """All rows of a tile but the first."""
    BLOCK_N: gl.constexpr = sizes[2]
    D: gl.constexpr = sizes[3]
    PIECE: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pieces = values._reinterpret(
        values.dtype, [values.shape[0] * (D // 64) * (BLOCK_N // PIECE), PIECE, 64], values.layout
    )
    for half in gl.static_range(D // 64):
        for number in range(kept // PIECE, BLOCK_N // PIECE):
            piece = pieces.index((slot * (D // 64) + half) * (BLOCK_N // PIECE) + number)
            row = number * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT))
            x = piece.load(LAYOUT)
            piece.store(gl.where((row < kept)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weigh(scores, m, l, number, qk_scale, query_pos, sizes: gl.constexpr, MASKED: gl.constexpr):
    """-> the weights of a tile, m, l, and what the sums before it are multiplied by"""
    BLOCK_N: gl.constexpr = sizes[2]
    LAYOUT: gl.constexpr = scores.type.layout
    if MASKED:
        key = number * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(key[None, :] <= query_pos[:, None], scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    p = _exp2(scores * qk_scale - m_new[:, None])
    alpha = _exp2(m - m_new)
    l = l * alpha + gl.sum(p, 1)
    return p, m_new, l, alpha


@gluon.jit
def _rounds(scores, p, acc, m, l, begin, end, slots, NUMBER: gl.constexpr, where, query_pos, qk_scale,
            sizes: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Tiles begin .. end: p has the weights of the one before, whose values are still to be added."""
    queries, keys, values, full_k, full_v, empty_k, empty_v = slots
    context_len = where[6]
    STAGES: gl.constexpr = sizes[4]
    ACC: gl.constexpr = acc.type.layout
    for number in range(begin, end):
        slot = number % STAGES
        mbarrier.wait(full_k.index(slot), number // STAGES & 1)
        scores = warpgroup_mma(
            queries.index(NUMBER), keys.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        before = number - 1
        slot_before = before % STAGES
        mbarrier.wait(full_v.index(slot_before), before // STAGES & 1)
        acc = warpgroup_mma(p, values.index(slot_before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(empty_k.index(slot))
        weights, m, l, alpha = _weigh(scores, m, l, number, qk_scale, query_pos, sizes, MASKED)
        next_p = gl.convert_layout(weights.to(values.dtype), gl.DotOperandLayout(0, ACC, 2))
        # Of the next weights, too: else the compiler waits before it computes them.
        acc, p, next_p = warpgroup_mma_wait(0, deps=[acc, p, next_p])
        mbarrier.arrive(empty_v.index(slot_before))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        p = next_p
        if MASKED:
            _clear_past(values, full_v, number, context_len, sizes)
    return scores, p, acc, m, l


@gluon.jit
def _attend(NUMBER: gl.constexpr, slots, to, where, sizes: gl.constexpr):
    """Half of the rows."""
    queries, keys, values, full_k, full_v, empty_k, _ = slots
    q_ptr, q_token, q_head, out_ptr, out_token, out_head, sinks, qk_scale = to
    kv_head, token, first, num_rows, num_full, num_tiles, context_len = where
    GROUP: gl.constexpr = sizes[0]
    BLOCK_N: gl.constexpr = sizes[2]
    D: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    ROWS_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])

    row = NUMBER * 64 + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, ROWS_LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, ROWS_LAYOUT))
    head = kv_head * GROUP + row % GROUP
    q_offset = (token + row // GROUP).to(gl.int64) * q_token + head * q_head
    exists = (row < num_rows)[:, None]
    x = gl.load(q_ptr + q_offset[:, None] + columns[None, :], mask=exists, other=0.0)
    queries.index(NUMBER).store(x)
    fence_async_shared()
    gl.thread_barrier()

    score_row = NUMBER * 64 + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, SCORES))
    query_pos = first + score_row // GROUP
    m = gl.full([HALF_ROWS], FINITE_MIN, gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([HALF_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([HALF_ROWS, D], gl.float32, ACC)
    scores = gl.zeros([HALF_ROWS, BLOCK_N], gl.float32, SCORES)

    mbarrier.wait(full_k.index(0), 0, pred=num_tiles > 0)
    scores = warpgroup_mma(queries.index(NUMBER), keys.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty_k.index(0))
    weights, m, l, _ = _weigh(scores, m, l, 0, qk_scale, query_pos, sizes, True)
    p = gl.convert_layout(weights.to(values.dtype), gl.DotOperandLayout(0, ACC, 2))
    if num_tiles > 0:
        _clear_past(values, full_v, 0, context_len, sizes)
    later = gl.maximum(num_full, 1)
    scores, p, acc, m, l = _rounds(
        scores, p, acc, m, l, 1, later, slots, NUMBER, where, query_pos, qk_scale, sizes, False
    )
    scores, p, acc, m, l = _rounds(
        scores, p, acc, m, l, later, num_tiles, slots, NUMBER, where, query_pos, qk_scale, sizes, True
    )
    last = gl.maximum(num_tiles - 1, 0)
    mbarrier.wait(full_v.index(last % STAGES), last // STAGES & 1, pred=num_tiles > 0)
    acc = warpgroup_mma(p, values.index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    if sinks is not None:
        sink = gl.load(sinks + kv_head * GROUP + score_row % GROUP) * EXP2_SCALE
        m_new = gl.maximum(m, sink)
        alpha = _exp2(m - m_new)
        l = l * alpha + _exp2(sink - m_new)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
    inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
    result = acc * gl.convert_layout(inverse, gl.SliceLayout(1, ACC))[:, None]
    result = gl.convert_layout(result.to(values.dtype), ROWS_LAYOUT)
    out_offset = (token + row // GROUP).to(gl.int64) * out_token + head * out_head
    gl.store(out_ptr + out_offset[:, None] + columns[None, :], result, mask=exists)

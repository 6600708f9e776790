# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""The loop of every attention kernel over pages: a tile of query rows takes a range of positions.

Rows are packed: the query heads of one KV head stand side by side, token after token, so a page is read once for all of
them. The softmax is online, in powers of two. A row carries its greatest score so far (m), the sum of its weights (l)
and the weighted sum of values (acc); alpha rescales l and acc when m grows. m begins at FINITE_MIN instead of -inf, so
a row that sees nothing comes out as zeros."""

import triton
import triton.language as tl

from quire.ops.gpu.attention.kv_8bit import interleave, split_even_odd, unpack_words
from quire.ops.gpu.attention.pages import LOG2E
from quire.ops.gpu.attention.plan import first_seen

EXP2_SCALE = tl.constexpr(LOG2E)  # exp(x) = exp2(x * EXP2_SCALE)
FINITE_MIN = tl.constexpr(-1e30)


@triton.jit
def find_places(pos, end, run_begin, places):
    """Where positions lie in their sequence: at their own number, unless they are of a path."""
    if places is not None:
        on_path = (pos >= run_begin) & (pos < end)
        pos = tl.where(on_path, tl.load(places + pos - run_begin, mask=on_path, other=0), pos)
    return pos


@triton.jit
def count_bits(words):
    """The number of bits that are set in words of 64 bits -> int32"""
    x = words.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return ((x + (x >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def attend(
    acc,  # [ROWS, D_PAD] fp32
    m,  # [ROWS] fp32
    l,  # [ROWS] fp32
    q,  # [ROWS, D_PAD], of the type in which K and V are multiplied
    begin,
    end,  # positions begin .. end, BLOCK_N in a round
    first,  # positions before it are seen by no row, and are not read: with a window, their blocks may be others' now
    table,  # the sequence's blocks
    pages,  # PageArgs
    kv_head,
    query_pos,  # [ROWS]
    slope,  # [ROWS], or None
    bias,  # [ROWS] pointers to the bias of distance 0, with REACH others before and behind it; or None
    ancestors,  # [ROWS] bits, or None: the places of its tree that the row sees, itself among them
    run_begin,  # the place at which the tree begins; without one, the position of the run's first query
    places,  # of positions run_begin and following (all rows are of one token), or None: where they are
    score,  # ScoreArgs
    MASKED: tl.constexpr,  # not all rows see all of the positions
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,  # of offsets into the layer's pages
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
):
    """-> acc, m, l after these positions"""
    ROWS: tl.constexpr = q.shape[0]
    D_PAD: tl.constexpr = q.shape[1]
    KV_8BIT: tl.constexpr = pages.k.dtype.element_ty == tl.int16
    FP8: tl.constexpr = pages.k_scales is None
    PER_WORD: tl.constexpr = 2 if KV_8BIT else 1
    k = pages.k + kv_head * pages.head
    v = pages.v + kv_head * pages.head
    k_scales = pages.k_scales + kv_head * pages.scale_head if pages.k_scales is not None else None
    v_scales = pages.v_scales + kv_head * pages.scale_head if pages.v_scales is not None else None
    columns = tl.arange(0, D_PAD // PER_WORD)
    exists = (columns < D // PER_WORD)[None, :]
    lane = tl.arange(0, BLOCK_N)
    odd_acc = l  # of the odd columns, where K and V have 8 bits
    odd_q = l
    if KV_8BIT:
        acc, odd_acc = split_even_odd(acc, ROWS, D_PAD)
        q, odd_q = split_even_odd(q, ROWS, D_PAD)
    place = find_places(begin + lane, end, run_begin, places)
    block = tl.load(table + place // BLOCK_SIZE, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        pos = start + lane
        inside = pos < end
        if WINDOW != 0 and MASKED:
            inside = inside & (pos >= first)
        present = inside[:, None] & exists if MASKED else exists
        row_offset = block.to(OFFSET_TYPE) * pages.block + (place % BLOCK_SIZE) * pages.slot
        offsets = row_offset[:, None] + columns[None, :]
        scale_offset = block.to(OFFSET_TYPE) * pages.scale_block + (place % BLOCK_SIZE) * pages.scale_slot

        keys = tl.load(k + offsets, mask=present, other=0)
        if KV_8BIT:
            keys, odd_keys = unpack_words(keys, FP8)
            scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")  # [ROWS, BLOCK_N]
            scores = tl.dot(odd_q, tl.trans(odd_keys.to(q.dtype)), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if k_scales is not None:
            scores *= tl.load(k_scales + scale_offset, mask=inside, other=0.0)[None, :]

        # exp2 takes scores * late_scale: a scale that nothing comes after is multiplied last.
        late_scale = score.qk_scale
        if score.cap is not None:
            scores = score.cap * (1.0 - 2.0 / (tl.exp(2.0 * score.qk_scale * scores) + 1.0))  # tanh
            late_scale = 1.0
        key_pos = pos[None, :]
        if ancestors is not None:
            draft = pos - run_begin
            if slope is not None or bias is not None or WINDOW != 0:  # a node is as deep as it has ancestors
                before = (tl.full([1], 1, tl.int64) << tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)) - 1
                key_pos = tl.where((draft < 0)[None, :], key_pos, run_begin + count_bits(ancestors[:, None] & before))
        if slope is not None:
            scores = scores * late_scale + slope[:, None] * (key_pos - query_pos[:, None])
            late_scale = 1.0
        if bias is not None:
            distance = tl.minimum(tl.maximum(key_pos - query_pos[:, None], -REACH), REACH)
            scores = scores * late_scale + tl.load(bias[:, None] + distance) * EXP2_SCALE
            late_scale = 1.0
        if MASKED:
            if ancestors is not None:
                bit = (ancestors[:, None] >> tl.minimum(tl.maximum(draft, 0), 63)[None, :].to(tl.int64)) & 1
                seen = inside[None, :] & ((draft < 0)[None, :] | (bit != 0))
            else:
                seen = inside[None, :] & (key_pos <= query_pos[:, None])
            if WINDOW != 0:
                seen = seen & (key_pos >= first_seen(query_pos, WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1) * late_scale)
        p = tl.exp2(scores * late_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        m = m_new
        l = l * alpha + tl.sum(p, 1)
        if v_scales is not None:
            p *= tl.load(v_scales + scale_offset, mask=inside, other=0.0)[None, :]
        p = p.to(q.dtype)
        values = tl.load(v + offsets, mask=present, other=0)
        if KV_8BIT:
            values, odd_values = unpack_words(values, FP8)
            odd_acc = tl.dot(p, odd_values.to(q.dtype), odd_acc * alpha[:, None], input_precision="ieee")
        acc = tl.dot(p, values.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
        # Prefetch the block ids of the next round: an address that waits for a load of its own round would halve the
        # rounds of K and V that are in flight.
        place = find_places(pos + BLOCK_N, end, run_begin, places)
        block = tl.load(table + place // BLOCK_SIZE, mask=pos + BLOCK_N < end, other=0)
    if KV_8BIT:
        acc = interleave(acc, odd_acc, ROWS, D_PAD)
    return acc, m, l


@triton.jit
def add_sink(acc, m, l, score):
    """-> acc, m, l with one score [ROWS] more, whose value is zero. A score of -inf changes nothing."""
    m_new = tl.maximum(m, score)
    alpha = tl.exp2(m - m_new)
    return acc * alpha[:, None], m_new, l * alpha + tl.exp2(score - m_new)

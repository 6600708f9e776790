# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""The loop that all attention over pages shares: a tile of query rows walks over a range of positions.

Rows are packed: the query heads of one KV head stand side by side, token after token, so a page is read once for all
of them. A row carries its greatest score (`peak`, in powers of two), the sum of its weights (`total`) and the weighted
sum of values (`acc`); FINITE_MIN instead of -inf as the first peak lets a row that sees nothing come out as zeros."""

import triton
import triton.language as tl

from quire.ops.gpu.attention.kv_8bit import interleave, split_even_odd, unpack_words
from quire.ops.gpu.attention.pages import LOG2E

EXP2_SCALE = tl.constexpr(LOG2E)
FINITE_MIN = tl.constexpr(-1e30)


@triton.jit
def attend(
    acc,  # [ROWS, D_PAD] fp32
    m,  # [ROWS]
    l,  # [ROWS]
    q,  # [ROWS, D_PAD] in the type of products
    begin,
    end,  # positions begin .. end are walked over, BLOCK_N in a round
    table,  # the sequence's blocks
    k,
    v,  # at the KV head; of 8 bits: in words
    stride_block,
    stride_slot,
    k_scales,
    v_scales,  # at the KV head, or None
    scale_block,
    scale_slot,
    query_pos,  # [ROWS]
    slope,  # [ROWS], or None
    bias,  # [ROWS] pointers to what distance 0 is worth, REACH others before and behind it; or None
    ancestors,  # [ROWS] bits, or None: the drafts of its run that the row sees, itself among them
    run_begin,  # the position of the run's first query
    run_positions,  # of the run's queries: in a tree they are depths
    factor,
    cap,
    MASKED: tl.constexpr,  # not all rows see all of the positions
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    CODES: tl.constexpr,  # K and V have 8 bits
    OFFSET_TYPE: tl.constexpr,  # the type of offsets into the layer's pages
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    FP8: tl.constexpr = k_scales is None
    PER_WORD: tl.constexpr = 2 if CODES else 1
    columns = tl.arange(0, D_PAD // PER_WORD)
    exists = (columns < D // PER_WORD)[None, :]
    lane = tl.arange(0, BLOCK_N)
    odd_acc = l  # the odd columns' sums, where there are codes
    odd_q = l
    if CODES:
        acc, odd_acc = split_even_odd(acc, ROWS, D_PAD)
        q, odd_q = split_even_odd(q, ROWS, D_PAD)
    block = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        pos = start + lane
        inside = pos < end
        kept = inside[:, None] & exists if MASKED else exists
        at = block.to(OFFSET_TYPE) * stride_block + (pos % BLOCK_SIZE) * stride_slot
        offsets = at[:, None] + columns[None, :]
        scale_at = block.to(OFFSET_TYPE) * scale_block + (pos % BLOCK_SIZE) * scale_slot

        keys = tl.load(k + offsets, mask=kept, other=0)
        if CODES:
            keys, odd_keys = unpack_words(keys, FP8)
            scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")  # [ROWS, BLOCK_N]
            scores = tl.dot(odd_q, tl.trans(odd_keys.to(q.dtype)), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if k_scales is not None:
            scores *= tl.load(k_scales + scale_at, mask=inside, other=0.0)[None, :]

        # Scores whose power of two is the weight are scores * rest; where they are only scaled, that is done late.
        rest = factor
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * factor * scores) + 1.0))  # tanh
            rest = 1.0
        key_pos = pos
        if ancestors is not None:
            draft = pos - run_begin
            key_pos = tl.where(draft < 0, pos, tl.load(run_positions + draft, mask=(draft >= 0) & inside, other=0))
        if slope is not None:
            scores = scores * rest + slope[:, None] * (key_pos[None, :] - query_pos[:, None])
            rest = 1.0
        if bias is not None:
            distance = tl.minimum(tl.maximum(key_pos[None, :] - query_pos[:, None], -REACH), REACH)
            scores = scores * rest + tl.load(bias[:, None] + distance) * EXP2_SCALE
            rest = 1.0
        if MASKED:
            if ancestors is not None:
                bit = (ancestors[:, None] >> tl.maximum(draft, 0)[None, :].to(tl.int64)) & 1
                seen = inside[None, :] & ((draft < 0)[None, :] | (bit != 0))
            else:
                seen = inside[None, :] & (key_pos[None, :] <= query_pos[:, None])
            if WINDOW > 0:
                seen = seen & (key_pos[None, :] > query_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1) * rest)
        weights = tl.exp2(scores * rest - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        m = m_new
        l = l * alpha + tl.sum(weights, 1)
        if v_scales is not None:
            weights *= tl.load(v_scales + scale_at, mask=inside, other=0.0)[None, :]
        weights = weights.to(q.dtype)
        values = tl.load(v + offsets, mask=kept, other=0)
        if CODES:
            values, odd_values = unpack_words(values, FP8)
            odd_acc = tl.dot(weights, odd_values.to(q.dtype), odd_acc * alpha[:, None], input_precision="ieee")
        acc = tl.dot(weights, values.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
        # A block's number is fetched one round ahead: an address that hangs on a load of its own round would halve
        # how many rounds of K and V are under way.
        block = tl.load(table + (pos + BLOCK_N) // BLOCK_SIZE, mask=pos + BLOCK_N < end, other=0)
    if CODES:
        acc = interleave(acc, odd_acc, ROWS, D_PAD)
    return acc, m, l


@triton.jit
def add_sink(acc, m, l, score):
    """What a row carries after one score [ROWS] more, whose value is zero. -inf changes nothing."""
    m_new = tl.maximum(m, score)
    alpha = tl.exp2(m - m_new)
    return acc * alpha[:, None], m_new, l * alpha + tl.exp2(score - m_new)

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The loop that all attention over pages shares: a tile of query rows walks over a range of positions.

Rows are packed: the query heads of one KV head stand side by side, token after token, so a page is read once for all
of them. A row carries its greatest score (`peak`, in powers of two), the sum of its weights (`total`) and the weighted
sum of values (`acc`); FINITE_MIN instead of -inf as the first peak lets a row that sees nothing come out as zeros."""

import triton
import triton.language as tl

FINITE_MIN = tl.constexpr(-1e30)


@triton.jit
def attend(
    acc,  # [ROWS, D_PAD] fp32
    peak,  # [ROWS]
    total,  # [ROWS]
    q,  # [ROWS, D_PAD] in the type of products
    begin,
    end,  # positions begin .. end are walked over, BLOCK_N in a round
    table,  # the sequence's blocks
    k,
    v,  # at the KV head
    stride_block,
    stride_slot,
    k_units,
    v_units,  # at the KV head, or None
    unit_block,
    unit_slot,
    query_pos,  # [ROWS]
    slope,  # [ROWS], or None
    ancestors,  # [ROWS] bits, or None: the drafts of its run that the row sees, itself among them
    run_begin,  # the position of the run's first query
    run_positions,  # of the run's queries: in a tree they are depths
    factor,
    cap,
    MASKED: tl.constexpr,  # not all rows see all of the positions
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    columns = tl.arange(0, D_PAD)
    lane = tl.arange(0, BLOCK_N)
    block = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < end, other=0)
    for start in range(begin, end, BLOCK_N):
        pos = start + lane
        inside = pos < end
        kept = inside[:, None] & (columns < D)[None, :] if MASKED else (columns < D)[None, :]
        at = block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_slot
        offsets = at[:, None] + columns[None, :]

        keys = tl.load(k + offsets, mask=kept, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")  # [ROWS, BLOCK_N]
        if k_units is not None:
            unit_at = block.to(tl.int64) * unit_block + (pos % BLOCK_SIZE) * unit_slot
            scores *= tl.load(k_units + unit_at, mask=inside, other=0.0)[None, :]

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
        if MASKED:
            if ancestors is not None:
                bit = (ancestors[:, None] >> tl.maximum(draft, 0)[None, :].to(tl.int64)) & 1
                seen = inside[None, :] & ((draft < 0)[None, :] | (bit != 0))
            else:
                seen = inside[None, :] & (key_pos[None, :] <= query_pos[:, None])
            if WINDOW > 0:
                seen = seen & (key_pos[None, :] > query_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1) * rest)
        weights = tl.exp2(scores * rest - higher[:, None])
        shrink = tl.exp2(peak - higher)
        peak = higher
        total = total * shrink + tl.sum(weights, 1)
        if v_units is not None:
            weights *= tl.load(v_units + unit_at, mask=inside, other=0.0)[None, :]
        values = tl.load(v + offsets, mask=kept, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), values, acc * shrink[:, None], input_precision="ieee")
        # A block's number is fetched one round ahead: an address that hangs on a load of its own round would halve
        # how many rounds of K and V are under way.
        block = tl.load(table + (pos + BLOCK_N) // BLOCK_SIZE, mask=pos + BLOCK_N < end, other=0)
    return acc, peak, total

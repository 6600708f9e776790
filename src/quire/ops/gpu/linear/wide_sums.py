# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Sums of splits are added up by all the programs of a tile, each a share of its outputs.

When one program adds up all of them, the others idle for as long as it takes to read several tiles through one
multiprocessor: up to a fifth of the time of a GEMM with few outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ARRIVED, GONE, LEFT = gl.constexpr(1), gl.constexpr(1 << 4), gl.constexpr(1 << 12)  # units of a ticket's fields


@gluon.jit
def finish(
    acc,
    out_ptr,
    bias_ptr,
    partials_ptr,
    tickets_ptr,
    first_output,
    first_token,
    N,
    M,
    SPLITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    POLLS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """acc [outputs, tokens], the sums of a program's share of the inputs, become out [M, N], with a bias. Programs are
    numbered (tile of tokens, tile of outputs, share)."""
    if SPLITS > 1:
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        base = partials_ptr + tile.to(gl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        sums = flat(acc)
        quads = gl.arange(0, BLOCK_N * BLOCK_M // 4, gl.SliceLayout(1, sums.type.layout))
        inside = quads[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
        gl.store(base + gl.program_id(2) * (BLOCK_N * BLOCK_M) + inside, sums)
        gl.thread_barrier()  # one thread changes the ticket: the sums of all threads come first
        mine, others = take_shares(tickets_ptr + tile, SPLITS, POLLS)
        SHARE: gl.constexpr = BLOCK_N // SPLITS
        for number in range(SPLITS):
            if (number == mine) | ((others >> number & 1) == 1):
                total = sum_of_share(base, number, SHARE, BLOCK_N, BLOCK_M, SPLITS, WARPS)
                _store(out_ptr, bias_ptr, total, first_output + number * SHARE, first_token, N, M, WARPS)
    else:
        _store(out_ptr, bias_ptr, acc, first_output, first_token, N, M, WARPS)


@gluon.jit
def take_shares(ticket_ptr, SPLITS: gl.constexpr, POLLS: gl.constexpr):
    """When the sums of all splits are written, each program adds up a share of the tile. -> the number of this
    program's share, or -1, and a bit for each share of others that it takes too.

    Programs of a tile need not run at the same time: one that has waited long leaves its share to the last that
    arrives, which waits for none. A ticket has four bits that count arrivals, a bit for each share that was left
    behind, and the number of programs that have left otherwise. The last to leave makes it zero."""
    LAST: gl.constexpr = SPLITS - 1
    state = gl.atomic_add(ticket_ptr, ARRIVED, sem="acq_rel", scope="gpu")
    mine = state & 15
    others = (state // GONE) & 255
    if mine < LAST:
        others = 0
        polls = 0
        while ((state & 15) <= LAST) & (polls < POLLS):
            state = gl.atomic_add(ticket_ptr, 0, sem="acq_rel", scope="gpu")
            polls += 1
    if (mine < LAST) & ((state & 15) <= LAST):
        state = gl.atomic_add(ticket_ptr, GONE << mine, sem="acq_rel", scope="gpu")
        if (state & 15) <= LAST:
            mine = -1
    else:
        state = gl.atomic_add(ticket_ptr, LEFT, sem="acq_rel", scope="gpu")
    gone = (state // GONE) & 255
    gone = (gone & 0x55) + (gone >> 1 & 0x55)
    gone = (gone & 0x33) + (gone >> 2 & 0x33)
    if state // LEFT + (gone & 15) + (gone >> 4) == LAST:
        gl.store(ticket_ptr, 0)
    return mine, others


@gluon.jit
def sum_of_share(
    base,
    share,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The sums of some of a tile's outputs, in the order of the splits."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    quads = gl.arange(0, ROWS * BLOCK_M // 4, gl.SliceLayout(1, LAYOUT))
    inside = quads[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :] + share * (ROWS * BLOCK_M)
    total = gl.zeros([ROWS * BLOCK_M // 4, 4], gl.float32, LAYOUT)
    for split in gl.static_range(SPLITS):
        total += gl.load(base + split * (BLOCK_N * BLOCK_M) + inside, cache_modifier=".cg")
    return _unflat(total, ROWS, BLOCK_M)


@gluon.jit
def flat(acc):
    """Sums [outputs, tokens], in the order in which a warp writes them at once, four of a lane."""
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    return acc.reshape([N // 16, 2, 8, M // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([N * M // 4, 4])


@gluon.jit
def _unflat(sums, N: gl.constexpr, M: gl.constexpr):
    return sums.reshape([N // 16, M // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([N, M])


@gluon.jit
def _store(out_ptr, bias_ptr, acc, first_output, first_token, N, M, WARPS: gl.constexpr):
    """acc [outputs, tokens]. Lanes write neighbouring outputs of a token, which they get through shared memory: as they
    leave the tensor cores, a lane has one of every token."""
    LANES: gl.constexpr = min(acc.shape[0] // 8, 16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    outputs = first_output + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    tokens = first_token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        places = first_output + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + places, mask=places < N, other=0.0).to(gl.float32)[:, None]
    offsets = tokens.to(gl.int64)[None, :] * N + outputs[:, None]
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    gl.store(out_ptr + offsets, gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT), mask=inside)

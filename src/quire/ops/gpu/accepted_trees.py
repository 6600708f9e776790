# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Where a tree of drafts goes on, if only the device knows which of the last drafts are accepted.

The host sends the head's first step with as many tokens as may be accepted, and one: here they become those of the
accepted branch, with the hidden states of its nodes. What the head reads behind them is void, and is read anew."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.sampling.accept import MAX_PATH
from quire.ops.gpu.sampling.job import FIELDS, NUM_TOKENS


def follow_accepted_branch(
    first_step: Sequence[Tensor],
    verified: Sequence[Tensor],
    tokens: Tensor,
    params: Tensor,
    paths: Tensor,
    window: int,
) -> None:
    """Of S sequences with D tokens each, `first_step` is ids and hidden_rows [S * D], the rows and logit_rows [S];
    `verified` is first lines and known tokens [S]. tokens [lines], params and paths [rows, MAX_PATH] are the target's
    sampler's. Writes ids, hidden_rows and logit_rows."""
    ids, hidden_rows, rows, logit_rows = first_step
    first_lines, known = verified
    count = len(ids) // len(rows)
    _follow[(len(rows),)](
        ids, hidden_rows, rows, logit_rows, first_lines, known, tokens, params, paths, window, count,
        COUNT=next_power_of_two(count), num_warps=1,
    )  # fmt: skip


def move_levels(
    logit_rows: Tensor,
    known: Tensor,
    rows: Tensor,
    steps: Sequence[Sequence[Tensor]],
    keys: Tensor,
    more_keys: Tensor,
    tables: Tensor,
    count: int,
    block_size: int,
) -> None:
    """The levels behind: `steps` are contexts [S], positions and slots [S * top_k] of each, as far apart as the first
    two; keys [levels, 2, S] become those of `more_keys` from the number of accepted drafts on. The first step has
    `count` tokens of each sequence, of which `logit_rows` [S] are the last that count."""
    num_levels, _, num_seqs = keys.shape
    contexts, positions, slots = steps if num_levels > 1 else [[logit_rows]] * 3  # nothing is written there
    top_k = len(positions[0]) // num_seqs
    strides = [(one[1].data_ptr() - one[0].data_ptr()) // 4 if num_levels > 2 else 0 for one in (contexts, positions)]
    _move_levels[(num_seqs,)](
        logit_rows, known, rows, contexts[0], positions[0], slots[0], keys, more_keys, tables, count, *strides,
        tables.stride(0), num_levels, num_seqs, top_k, BLOCK_SIZE=block_size, TOP_K=next_power_of_two(top_k),
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "window"])
def _follow(
    ids,
    hidden_rows,
    rows,
    logit_rows,
    first_lines,
    known,
    tokens,
    of_rows,
    paths,
    window,
    count,
    COUNT: tl.constexpr,
):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    if row >= 0:
        num_known, first_line = tl.load(known + seq), tl.load(first_lines + seq)
        length = tl.load(of_rows + row * FIELDS + NUM_TOKENS).to(tl.int32)
        accepted = tl.minimum(tl.maximum(length - num_known - 1, 0), count - 1)
        number = tl.arange(0, COUNT)
        line = tl.load(paths + row * MAX_PATH + number, mask=(number > 0) & (number <= accepted), other=0)
        token = tl.load(tokens + first_line + line, mask=number <= accepted, other=0)
        is_token = number < count
        tl.store(ids + seq * count + number, tl.maximum(token, 0), mask=is_token)
        place = num_known - 1 + line  # void ones read what the root reads
        tl.store(hidden_rows + seq * count + number, row.to(tl.int32) * window + place % window, mask=is_token)
        tl.store(logit_rows + seq, seq * count + accepted)


@triton.jit(do_not_specialize=["count", "context_stride", "stride", "num_levels", "num_seqs", "top_k"])
def _move_levels(
    logit_rows,
    known,
    rows,
    contexts,
    positions,
    slots,
    keys,
    more_keys,
    tables,
    count,
    context_stride,
    stride,
    table_stride,
    num_levels,
    num_seqs,
    top_k,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
):
    seq = tl.program_id(0)
    if tl.load(rows + seq) >= 0:
        accepted = tl.load(logit_rows + seq) - seq * count
        first = tl.load(known + seq) + accepted  # the place of the first node
        number = tl.arange(0, TOP_K)
        is_node = number < top_k
        for step in range(num_levels - 1):
            place = first + step * top_k + number
            block = tl.load(tables + seq.to(tl.int64) * table_stride + place // BLOCK_SIZE, mask=is_node, other=0)
            node = step * stride + seq * top_k + number
            tl.store(contexts + step * context_stride + seq, first + (step + 1) * top_k)
            tl.store(positions + node, first + step + 0 * number, mask=is_node)
            tl.store(slots + node, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=is_node)
        for level in range(num_levels):
            for part in range(2):
                key = tl.load(more_keys + ((level + accepted) * 2 + part) * num_seqs + seq)
                tl.store(keys + (level * 2 + part) * num_seqs + seq, key)

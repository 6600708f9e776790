# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Where a chain of drafts goes on, if only the device knows how many of the last drafts are accepted.

The host sends the first step of the chain as if all were: a step of the verified token and all drafts. What the head
reads behind the accepted ones is void, and is read anew in a later step."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.sampling.job import FIELDS, NUM_TOKENS


def continue_behind_accepted(
    ids: Tensor,
    rows: Tensor,
    logit_rows: Tensor,
    seq_starts: Tensor,
    steps: Sequence[Sequence[Tensor]],
    tables: Tensor,
    verified: Sequence[Tensor],
    tokens: Tensor,
    target_params: Tensor,
    draft_params: Tensor,
    block_size: int,
) -> None:
    """Of S sequences, `rows` [S], `logit_rows` [S] and `seq_starts` [S + 1], whose T tokens `ids` [T] follow each
    other; `steps` are positions, contexts and slots of the next steps, [S] each, as far apart as the first two.
    `verified` is of `VerifiedLines`: lines [T] of `tokens`, known [S] and lengths [S]. Writes ids, logit_rows, steps,
    and how many tokens the rows of the drafts' sampler have."""
    lines, known, lengths = verified
    num_steps = len(steps[0])
    positions, contexts, slots = steps if num_steps else [[ids]] * 3  # without next steps, nothing is written there
    stride = positions[1].data_ptr() - positions[0].data_ptr() if num_steps > 1 else 0
    _continue[(len(rows),)](
        ids,
        rows,
        logit_rows,
        seq_starts,
        positions[0],
        contexts[0],
        slots[0],
        tables,
        lines,
        known,
        lengths,
        tokens,
        target_params,
        draft_params,
        stride // ids.element_size(),
        tables.stride(0),
        num_steps,
        BLOCK_SIZE=block_size,
        BLOCK=next_power_of_two(len(ids) // len(rows)),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_steps"])
def _continue(
    ids,
    rows,
    logit_rows,
    seq_starts,
    positions,
    contexts,
    slots,
    tables,
    lines,
    known,
    lengths,
    tokens,
    target_params,
    draft_params,
    step_stride,
    table_stride,
    num_steps,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    if row >= 0:
        first, end = tl.load(seq_starts + seq), tl.load(seq_starts + seq + 1)
        num_known, length = tl.load(known + seq), tl.load(lengths + seq)
        if length < 0:
            length = tl.load(target_params + row * FIELDS + NUM_TOKENS).to(tl.int32)
        accepted = tl.minimum(tl.maximum(length - num_known - 1, 0), end - first - 1)
        tl.store(logit_rows + seq, first + accepted)
        last = num_known + accepted  # the position of the token behind
        tl.store(draft_params + row * FIELDS + NUM_TOKENS, (last + 1).to(tl.int64))
        for begin in range(first, end, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            line = tl.load(lines + place, mask=place < end, other=0)
            tl.store(ids + place, tl.maximum(tl.load(tokens + line, mask=place < end, other=0), 0), mask=place < end)
        for step in range(num_steps):
            position = last + step
            block = tl.load(tables + seq.to(tl.int64) * table_stride + position // BLOCK_SIZE)
            of_step = step * step_stride + seq
            tl.store(positions + of_step, position)
            tl.store(contexts + of_step, position + 1)
            tl.store(slots + of_step, block * BLOCK_SIZE + position % BLOCK_SIZE)

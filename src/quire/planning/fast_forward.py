"""Steps in which the same sequences decode, made at once: the scheduler is left as if it had planned each of them.

A simulation spends most of its steps so. Blocks are taken and indexed in the order in which the steps would do it, so
that later plans are the same, block by block."""

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.core.sequence import NEVER, PLACEHOLDER, Sequence

_TAKE, _INDEX = 0, 1  # what happens to a block


def num_steps_alike(scheduler: Scheduler, in_flight: StepPlan | None) -> int:
    """Steps from here on that do nothing but decode one token of every running sequence, if no request comes.
    `in_flight`: the plan that runs meanwhile, with async scheduling."""
    groups, ahead = scheduler.groups, in_flight is not None
    running = groups.running.items
    if not running or scheduler.speculation or scheduler.pages or scheduler.kv_blocks.window.size:
        return 0
    if groups.waiting.items and scheduler.rows.num_unreserved > 0:
        return 0  # a waiting sequence may be admitted
    if in_flight and (in_flight.swap_in or in_flight.swap_out):
        return 0
    size, steps = scheduler.limits.block_size, NEVER
    for seq in running:
        num_tokens, group = len(seq.tokens), seq.group
        if num_tokens - seq.num_computed != 1 or seq.num_placeholders != ahead or num_tokens <= group.num_prompt:
            return 0  # the sequence lacks more than the token after its last, or nothing
        if (left := group.length - num_tokens) < steps:
            steps = left
    if not ahead:
        steps -= 1  # the last token is sampled by a step of its own
    available = scheduler.kv_blocks.pool.num_available
    # Each sequence takes at most a block every `size` steps, and one at once.
    return min(steps, (available // len(running) - 1) * size)


def skip_steps(scheduler: Scheduler, in_flight: StepPlan | None, count: int, token: Callable[[Sequence], int]) -> None:
    """Leave the scheduler as after `count` steps. `token`: that a sequence samples in each of them."""
    running = scheduler.groups.running.items
    starts = [seq.num_computed for seq in running]
    for seq in running:
        if in_flight:
            seq.tokens.pop()
        seq.tokens += [token(seq)] * count
        if in_flight and len(seq.tokens) + 1 < seq.group.length:
            seq.tokens.append(PLACEHOLDER)
        elif in_flight:
            seq.num_placeholders = 0  # its last token is in flight
    _fill_blocks(scheduler, starts, count, 1 if in_flight else 0)
    for seq, start in zip(running, starts, strict=True):
        seq.num_computed = start + count
        seq.planned_step = scheduler.num_planned + count - 1
        seq.num_blocks_sent = len(seq.block_table)
    scheduler.skip(count)
    if in_flight:
        in_flight.step += count
        in_flight.admitted, in_flight.retired = [], []
        del in_flight.runs[len(running) :]  # of sequences that ended
        for run, seq in zip(in_flight.runs, running, strict=True):
            run.row, run.start, run.count = seq.row, seq.num_computed - 1, 1


def _fill_blocks(scheduler: Scheduler, starts: list[int], count: int, ahead: int) -> None:
    """Take a block for every sequence whose last one is full, and index full ones, in the order of the steps.

    Without async scheduling both happen while a step is planned, one sequence after the other. With it, a full block
    is indexed when its last token is known: after all sequences of the step have taken theirs."""
    kv_blocks, size = scheduler.kv_blocks, scheduler.limits.block_size
    running = scheduler.groups.running.items
    events = []  # (step, phase, sequence, what): the next of each sequence and kind
    for number, (seq, start) in enumerate(zip(running, starts, strict=True)):
        if (step := len(seq.block_table) * size - start) < count:
            events.append((step, 0, number, _TAKE))
        if (step := seq.index_at - start - 1) < count:
            events.append((step, ahead, number, _INDEX))
    heapify(events)
    while events:
        step, phase, number, what = events[0]
        seq = running[number]
        seq.num_computed = starts[number] + step + (what == _INDEX)
        if what == _TAKE:
            seq.block_table.append(kv_blocks.pool.take())
        else:
            kv_blocks.index_full_blocks(seq)
        if step + size < count and not (what == _INDEX and seq.index_at == NEVER):
            heapreplace(events, (step + size, phase, number, what))
        else:
            heappop(events)

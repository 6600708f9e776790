"""A snapshot of the scheduler for the live page: the owner of each block, both queues, the batches of the last steps.

Plain data, made only while a client watches. It contains no token ids."""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from quire.core.plan import StepPlan
from quire.core.records import SchedulerStats
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence

FREE, CACHED, FIRST_OWNER = 0, 1, 2  # in `Snapshot.owners`; from FIRST_OWNER on: an index into `Snapshot.sequences`
MAX_WAITING_SHOWN = 100  # the queue may be much longer; `stats.waiting` counts all
MAX_REFS = 255  # fits a byte


@dataclass(slots=True)
class SequenceView:
    request_id: str
    sample: int
    state: Literal["running", "waiting", "preempted"]
    num_prompt: int
    num_known: int  # prompt and output
    num_computed: int
    num_cached: int  # prompt tokens from the prefix cache
    num_blocks: int
    arrival: float  # time.monotonic()


@dataclass(slots=True)
class Chunk:
    """The part of a prompt that one step computes."""

    request_id: str
    sample: int
    start: int
    count: int


@dataclass(slots=True)
class StepView:
    """The batch of one step."""

    step: int
    decoding: int  # sequences that computed tokens behind their prompt
    chunks: list[Chunk]
    preempted: list[str]  # request ids
    ended: float = 0.0  # time.monotonic()
    seconds: float = 0.0  # of the run, without scheduling


@dataclass(slots=True, kw_only=True)
class Snapshot:
    now: float  # time.monotonic()
    stats: SchedulerStats
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    resident_bytes: int  # of the engine process
    owners: bytes  # uint16, little endian, for each block: FREE, CACHED, or FIRST_OWNER + the index of a sequence
    refs: bytes  # uint8 for each block: its references, at most MAX_REFS
    sequences: list[SequenceView]  # running ones in policy order, then the first of the waiting queue
    steps: list[StepView] = field(default_factory=list)  # since the snapshot before


def take_snapshot(scheduler: Scheduler, *, now: float, resident_bytes: int, steps: list[StepView]) -> Snapshot:
    """Costs some 100 ns a block and 1 us a sequence."""
    limits = scheduler.limits
    running = scheduler.groups.running.items
    waiting = scheduler.groups.waiting.items[:MAX_WAITING_SHOWN]
    return Snapshot(
        now=now,
        stats=scheduler.stats(),
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        resident_bytes=resident_bytes,
        owners=_owners(scheduler, running),
        refs=_refs(scheduler.kv_blocks.pool.refs),
        sequences=[_view(seq) for seq in (*running, *waiting)],
        steps=steps,
    )


def step_view(plan: StepPlan, scheduler: Scheduler, preempted: list[str]) -> StepView:
    """Call it before the next plan is made, while the rows of `plan` have their owners."""
    decoding, chunks = 0, []
    for run in plan.runs:
        seq = scheduler.rows[run.row]
        if run.start >= seq.group.num_prompt:
            decoding += 1
        else:
            chunks.append(Chunk(seq.group.id, seq.sample, run.start, run.count))
    return StepView(plan.step, decoding, chunks, preempted)


def _owners(scheduler: Scheduler, running: list[Sequence]) -> bytes:
    """The owner of a shared block is the last sequence in policy order that holds it."""
    pool = scheduler.kv_blocks.pool
    owners = array("H", bytes(2 * pool.num_blocks))
    for block in pool.cached:
        owners[block] = CACHED
    for owner, seq in enumerate(running, FIRST_OWNER):
        if seq.copy_from is not None:  # held until it has been copied
            owners[seq.copy_from] = owner
        for block in seq.held_blocks:
            owners[block] = owner
    return owners.tobytes()


def _refs(refs: list[int]) -> bytes:
    try:
        return bytes(refs)  # fast: no Python loop
    except ValueError:
        return bytes(min(count, MAX_REFS) for count in refs)


def _view(seq: Sequence) -> SequenceView:
    group = seq.group
    return SequenceView(
        group.id,
        seq.sample,
        "running" if seq.running else "preempted" if group.preempted else "waiting",
        group.num_prompt,
        seq.num_known,
        seq.num_computed,
        group.num_cached,
        len(seq.held_blocks),
        group.arrival,
    )

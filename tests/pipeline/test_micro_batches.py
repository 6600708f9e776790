"""Micro-batches: plans in flight of different sequences."""

from fakes import FakeExecutor, draft_policy, make_drafts_free
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler


def crowd(num_seqs: int, micro_batches: int, num_drafts: int = 0) -> tuple[Scheduler, FakeExecutor]:
    """Sequences whose prompts are computed."""
    limits = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=64, block_size=4, max_model_len=64)
    scheduler = Scheduler(
        limits, 200, ahead=micro_batches - 1, micro_batches=micro_batches, drafts=draft_policy(num_drafts)
    )
    if num_drafts:
        make_drafts_free(scheduler.speculation)
    executor = FakeExecutor(num_blocks=200, block_size=4, ahead=micro_batches - 1, num_drafts=num_drafts)
    for number in range(num_seqs):
        params = SamplingParams(max_tokens=20, seed=number, ignore_eos=True)
        scheduler.add(Request(id=f"r{number}", prompt_ids=[5, 6, 7 + number], params=params), 0.0)
    running = scheduler.groups.running
    while scheduler.groups.waiting.items or any(len(seq.tokens) - seq.num_computed > 1 for seq in running.items):
        scheduler.update(executor.run(scheduler.schedule()))
    return scheduler, executor


def rows(plan: StepPlan) -> set[int]:
    return {run.row for run in plan.runs}


def test_sequences_that_decode_are_divided_evenly() -> None:
    scheduler, executor = crowd(7, micro_batches=3)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [len(plan.runs) for plan in plans] == [3, 3, 1]
    assert set.union(*map(rows, plans)) == set(range(7))
    assert scheduler.awaits_output, "all of them are in flight"
    scheduler.update(executor.run(plans[0]))
    assert not scheduler.awaits_output
    again = scheduler.schedule()
    assert rows(again) == rows(plans[0]), "their tokens are known, those of the others are not"
    scheduler.check()


def test_a_sequence_that_waits_for_its_micro_batch_is_in_the_next() -> None:
    scheduler, executor = crowd(5, micro_batches=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (len(first.runs), len(second.runs)) == (3, 2)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    scheduler.add(Request(id="late", prompt_ids=[9] * 8, params=params), 0.0)
    scheduler.update(executor.run(first))
    third = scheduler.schedule()
    assert len(third.admitted) == 1 and rows(first) < rows(third), "a prompt goes with the next plan"
    scheduler.update(executor.run(second))
    scheduler.update(executor.run(third))
    assert [len(scheduler.schedule().runs) for _ in range(2)] == [3, 3]


def test_prompts_that_come_together_are_divided_among_micro_batches() -> None:
    limits = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=64, block_size=4, max_model_len=64)
    scheduler = Scheduler(limits, 200, ahead=1, micro_batches=2)
    for number in range(6):
        scheduler.add(Request(id=f"r{number}", prompt_ids=[number + 1] * 8, params=SamplingParams(max_tokens=4)), 0.0)
    plans = [scheduler.schedule() for _ in range(2)]
    assert [[run.count for run in plan.runs] for plan in plans] == [[8, 8, 8], [8, 8, 8]]


def test_chunks_of_one_prompt_may_be_in_flight_together() -> None:
    """Stages compute steps in order: the keys and values of the first chunk are there when the second comes."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, max_model_len=64)
    scheduler = Scheduler(limits, 40, ahead=1, micro_batches=2)
    executor = FakeExecutor(num_blocks=40, block_size=4, ahead=1)
    scheduler.add(Request(id="long", prompt_ids=[3] * 40, params=SamplingParams(max_tokens=2)), 0.0)
    plans = [scheduler.schedule() for _ in range(2)]
    assert [(run.start, run.count) for plan in plans for run in plan.runs] == [(0, 16), (16, 16)]
    for plan in plans:
        scheduler.update(executor.run(plan))
    scheduler.check()


def test_drafts_of_one_micro_batch_do_not_hold_up_the_next() -> None:
    """However little two steps together would take: another stage computes meanwhile."""
    scheduler, executor = crowd(4, micro_batches=2, num_drafts=3)
    first = scheduler.schedule()
    assert len(first.runs) == 2 and all(run.drafts for run in first.runs)
    assert not scheduler.awaits_output
    second = scheduler.schedule()
    assert len(second.runs) == 2 and scheduler.awaits_output, "all of them are in flight"
    for plan in (first, second):
        scheduler.update(executor.run(plan))
    scheduler.check()

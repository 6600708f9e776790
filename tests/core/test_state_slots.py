"""State slots: who holds them, where checkpoints are left, and which one a prefix hit continues from."""

from fakes import FakeExecutor
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler

BLOCK = 4


def engine(num_slots: int = 12, max_num_seqs: int = 4) -> tuple[Scheduler, FakeExecutor]:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=256, block_size=BLOCK, has_states=True
    )
    return Scheduler(limits, 100, num_slots=num_slots), FakeExecutor(
        num_blocks=100, block_size=BLOCK, num_slots=num_slots
    )


def ask(scheduler: Scheduler, executor: FakeExecutor, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """-> tokens of the prompt that came from the cache"""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    scheduler.add(Request(id=name, prompt_ids=prompt, params=params), 0.0)
    hits = 0
    while scheduler.has_work:
        for event in scheduler.update(executor.run(scheduler.schedule())):
            hits = event.num_cached
        scheduler.check()
    return hits


def test_the_same_prompt_hits_up_to_its_last_full_block() -> None:
    scheduler, executor = engine()
    prompt = list(range(1, 15))  # three blocks and two tokens
    assert [ask(scheduler, executor, str(turn), prompt) for turn in range(3)] == [0, 12, 12]


def test_where_prompts_branch_the_second_leaves_a_checkpoint() -> None:
    scheduler, executor = engine()
    prefix = list(range(1, 10))  # two blocks and a token
    hits = [ask(scheduler, executor, str(end), [*prefix, *[end] * 9]) for end in (20, 30, 40)]
    assert hits == [0, 0, 8]
    assert scheduler.kv_blocks.pool.num_cached == 2 + 3 * 2  # the blocks of the prefix are there once


def test_a_sequence_that_decodes_keeps_its_last_checkpoint_only() -> None:
    scheduler, executor = engine()
    ask(scheduler, executor, "a", [1, 2, 3, 4, 5], max_tokens=40)
    assert scheduler.states is not None
    scheduler.states.begin_plan(StepPlan(0, []))
    checkpoints = sorted(_depth(node) for node in scheduler.states.index.walk())
    assert checkpoints == [1, 11]  # of the prompt, and of 44 computed tokens


def _depth(node) -> int:
    return 0 if node.parent is None else 1 + _depth(node.parent)


def test_fewer_sequences_run_where_slots_are_few() -> None:
    scheduler, executor = engine(num_slots=6)
    for name in "abcd":
        scheduler.add(Request(id=name, prompt_ids=[ord(name)], params=SamplingParams(max_tokens=9, ignore_eos=True)), 0)
    widths = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        widths.append(len(plan.runs))
        scheduler.update(executor.run(plan))
        scheduler.check()
    assert max(widths) == 2


def test_an_evicted_block_takes_its_checkpoint_along() -> None:
    scheduler, executor = engine()
    ask(scheduler, executor, "a", list(range(1, 15)))
    assert scheduler.states is not None and len(list(scheduler.states.index.walk())) == 1
    assert scheduler.reset_prefix_cache("")
    assert not list(scheduler.states.index.walk())
    scheduler.states.begin_plan(StepPlan(0, []))
    scheduler.check()
    assert scheduler.states.pool.num_available == 12 and scheduler.states.pool.num_cached == 0


def depths(scheduler: Scheduler) -> list[int]:
    """Blocks before each checkpoint, the first to be evicted first."""
    states = scheduler.states
    assert states is not None
    states.begin_plan(StepPlan(0, []))
    nodes = {node.state: node for node in states.index.walk()}
    return [_depth(nodes[slot]) for slot in states.pool.cached]


def test_a_checkpoint_that_a_later_one_supersedes_is_evicted_first() -> None:
    scheduler, executor = engine(num_slots=30)
    ask(scheduler, executor, "other", [9] * 9)
    prompt = list(range(1, 15))
    ask(scheduler, executor, "a", prompt)
    ask(scheduler, executor, "b", [*prompt, *range(20, 29)])
    assert depths(scheduler) == [3, 2, 5]


def test_a_checkpoint_where_prompts_branch_outlives_others() -> None:
    scheduler, executor = engine(num_slots=9, max_num_seqs=2)
    prefix = list(range(1, 10))
    for end in (20, 30):
        ask(scheduler, executor, f"{end}", [*prefix, *[end] * 9])
    for other in range(40, 60):
        ask(scheduler, executor, f"{other}", [other] * 14)
    assert ask(scheduler, executor, "again", [*prefix, *[35] * 9]) == 8

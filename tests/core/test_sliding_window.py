"""Blocks behind a window are freed while a sequence runs, and a prefix that has only its last window left is a hit."""

from fakes import FakeExecutor
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.sliding_window import SlidingWindow

BLOCK, WINDOW = 4, 10


def make(num_blocks: int, **options: bool) -> tuple[Scheduler, FakeExecutor]:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=400, block_size=BLOCK)
    executor = FakeExecutor(num_blocks=num_blocks, block_size=BLOCK, window=WINDOW)
    return Scheduler(limits, num_blocks, window=WINDOW, **options), executor


def serve(scheduler: Scheduler, executor: FakeExecutor, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    """-> how many blocks were held after each step"""
    scheduler.add(Request(id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens, seed=1)), 0.0)
    held = []
    while scheduler.has_work:
        scheduler.update(executor.run(scheduler.schedule()))
        scheduler.check()
        held.append(scheduler.stats().held_blocks)
    return held


def test_what_a_window_reaches() -> None:
    window = SlidingWindow(WINDOW, BLOCK, max_chunk=8)
    assert [window.first_block(n) for n in (0, 9, 12, 13, 16, 17)] == [0, 0, 0, 1, 1, 2]  # position 12 sees 3 and on
    for start in range(60):
        for count in range(1, 9):
            held = -(-(start + count) // BLOCK) - window.first_block(start)
            assert held <= window.max_blocks(start + count)
    assert window.max_blocks(1000) == 5
    assert SlidingWindow(0, BLOCK, max_chunk=8).max_blocks(1000) == 250


def test_a_sequence_holds_its_window_however_long_it_becomes() -> None:
    for caching in (False, True):
        scheduler, executor = make(5, prefix_caching=caching)
        held = serve(scheduler, executor, "long", [1, 2, 3] * 30, max_tokens=300)
        assert max(held) == 5 and max(held[20:]) == 4
        assert scheduler.stats().preemptions == 0


def test_a_prefix_is_a_hit_if_its_last_window_is_cached() -> None:
    scheduler, executor = make(8)
    prompt = [token % 7 for token in range(50)]
    serve(scheduler, executor, "first", prompt, max_tokens=1)
    before = executor.num_computed  # the least recently used blocks are evicted: the first ones of the prompt
    serve(scheduler, executor, "again", prompt, max_tokens=1)
    assert executor.num_computed - before == 2
    assert scheduler.stats().prefix_hits == 48
    serve(scheduler, executor, "prefix", prompt[:20], max_tokens=1)
    assert executor.num_computed - before == 22

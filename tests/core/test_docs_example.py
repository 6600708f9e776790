"""The worked example of docs/scheduler.md."""

from fakes import FakeExecutor
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import Scheduler


def test_the_example_of_the_scheduler_page_is_true() -> None:
    scheduler = Scheduler(SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=20, block_size=4), 6)
    executor = FakeExecutor(num_blocks=6, block_size=4)
    for name, prompt in (("A", [1, 2, 3, 4, 5, 6]), ("B", [1, 2, 3, 4, 7, 8, 9])):
        scheduler.add(Request(id=name, prompt_ids=prompt, params=SamplingParams(seed=0, max_tokens=8)), 0.0)
    seen = []
    for step in range(5):
        if step == 4:
            scheduler.cancel("A")
        plan = scheduler.schedule()
        scheduler.update(executor.run(plan))
        seen.append(([(run.start, run.start + run.count) for run in plan.runs], plan.retired))
        tables = {seq.group.id: seq.block_table for seq in scheduler.groups.running.items}
        cached = scheduler.stats().cached_blocks
        assert (tables, cached) == (
            ({"A": [0, 1], "B": [0, 2]}, 0)
            if step < 3
            else ({"A": [0, 1, 3], "B": [0, 2, 4]}, 0)
            if step == 3
            else ({"B": [0, 2, 4]}, 1)
        )
    assert seen == [
        ([(0, 6), (4, 6)], []),
        ([(6, 7), (6, 7)], []),
        ([(7, 8), (7, 8)], []),
        ([(8, 9), (8, 9)], []),
        ([(9, 10)], [0]),
    ]

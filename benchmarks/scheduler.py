"""The time of schedule() and update(), and the share of held KV slots that is unused.

    python -m benchmarks.scheduler [--seqs 256] [--steps 300]

Prints a table and ends in one line of JSON. No model runs: a fake executor samples a fixed token."""

import argparse
import gc
import json
import platform
import random
from statistics import median
from time import perf_counter, process_time

from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler


class FixedTokenExecutor:
    """Samples token 1 for every row whose run reaches its last known token."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepOutput:
        for admission in plan.admitted:
            self.known[admission.row] = len(admission.tokens)
        sampled = []
        for run in plan.runs:
            if run.start + run.count == self.known[run.row]:
                self.known[run.row] += 1
                sampled.append(SampledRow(run.row, [1]))
        return StepOutput(plan.step, sampled)


def decode(num_seqs: int, num_steps: int, num_prompt: int) -> dict[str, float]:
    """Microseconds of schedule() and update() with `num_seqs` sequences that gain one token each."""
    limits = SchedulerLimits(
        max_num_seqs=num_seqs, max_num_batched_tokens=8192, max_model_len=num_prompt + num_steps + 512
    )
    scheduler = Scheduler(limits, num_seqs * (limits.max_model_len // 16 + 2))
    executor = FixedTokenExecutor()
    random.seed(0)
    for i in range(num_seqs):
        prompt = [random.randrange(32_000) for _ in range(num_prompt + i % 16)]  # blocks fill at different steps
        scheduler.add(Request(id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=num_steps + 400)), 0.0)
    while scheduler.stats().running < num_seqs:
        scheduler.update(executor.run(scheduler.schedule()))
    for _ in range(8):
        scheduler.update(executor.run(scheduler.schedule()))
    plans, updates = [], []
    gc.collect()
    for _ in range(num_steps):
        start = perf_counter()
        plan = scheduler.schedule()
        planned = perf_counter()
        output = executor.run(plan)
        ran = perf_counter()
        events = scheduler.update(output)
        updates.append(perf_counter() - ran)
        plans.append(planned - start)
        assert len(events) == num_seqs
    return {
        "schedule_min_us": min(plans) * 1e6,
        "schedule_median_us": median(plans) * 1e6,
        "update_min_us": min(updates) * 1e6,
        "update_median_us": median(updates) * 1e6,
    }


def mixed(num_requests: int, num_blocks: int) -> dict[str, float]:
    """A queue of requests with prompts of 32-2000 and outputs of 16-400 tokens on a pool that is nearly full."""
    limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096)
    scheduler, executor, rng = Scheduler(limits, num_blocks), FixedTokenExecutor(), random.Random(0)
    for i in range(num_requests):
        prompt = [rng.randrange(32_000) for _ in range(rng.randint(32, 2000))]
        scheduler.add(
            Request(id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=rng.randint(16, 400))), 0.0
        )
    held = used = steps = running = 0
    start = process_time()
    while scheduler.has_work:
        scheduler.update(executor.run(scheduler.schedule()))
        stats = scheduler.stats()
        if stats.waiting:  # while the pool is contended
            held, used = held + stats.held_slots, used + stats.used_slots
            running += stats.running
            steps += 1
    return {
        "waste": 1 - used / held,
        "fill": held / (steps * num_blocks * limits.block_size),
        "mean_running": running / steps,
        "preemptions": scheduler.stats().preemptions,
        "step_us": (process_time() - start) / scheduler.schedule().step * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    result: dict[str, object] = {"machine": platform.machine(), "python": platform.python_version()}
    print(
        f"{'decoding':>9} {'context':>8} {'schedule us (min, median)':>27} {'update us (min, median)':>25} {'sum':>7}"
    )
    for num_seqs, num_prompt in ((1, 500), (32, 500), (options.seqs, 500), (options.seqs, 3000)):
        row = decode(num_seqs, options.steps, num_prompt)
        total = row["schedule_median_us"] + row["update_median_us"]
        print(
            f"{num_seqs:>9} {num_prompt:>8} {row['schedule_min_us']:>16.0f} {row['schedule_median_us']:>10.0f}"
            f" {row['update_min_us']:>14.0f} {row['update_median_us']:>10.0f} {total:>7.0f}"
        )
        result[f"decode_{num_seqs}_at_{num_prompt}"] = {name: round(value, 1) for name, value in row.items()}
    row = mixed(400, 4000)
    print(
        f"mixed workload: {row['waste']:.2%} of held slots unused, {row['fill']:.0%} of the pool held, "
        f"{row['mean_running']:.0f} running, {row['preemptions']:.0f} preemptions, {row['step_us']:.0f} us a step"
    )
    result["mixed"] = {name: round(value, 4) for name, value in row.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Drafts of a simulation are planned, and take time, as those of an engine."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from math import inf
from typing import Any

import pytest

from quire.core.params import SamplingParams
from quire.core.plan import StepOutput, StepPlan
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.planning.drafting import Draft
from quire.planning.fleet import EngineFlags, Fleet, plan_engine
from quire.planning.hardware import find_hardware
from quire.planning.memory import Load
from quire.planning.packed_bytes import GpuFormat, NativeFormat
from quire.planning.plan import Setup
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.planner import make_plan
from quire.planning.replica import Replica
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import shape_config
from quire.planning.simulated_drafts import DraftingSteps
from quire.planning.simulated_request import SimulatedRequest
from quire.planning.step_counter import StepShape
from quire.planning.step_times import StepWork, roofline_times
from quire.planning.summary import summarize
from quire.planning.workload import Arrival, WorkloadSpec, generate
from quire.weights.checkpoint import open_checkpoint

LAPTOP, H200 = find_hardware("laptop-8-cores"), find_hardware("h200")
SYNTHETIC = '"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 1, 1]'

ALWAYS = '"num_speculative_tokens_per_batch_size": [[1, 256, 3]]'


class RecordedTimes:
    """Plays back measured step times."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)

    def seconds(self, work: StepWork) -> float:
        return next(self._seconds)


class TokenTimes:
    def seconds(self, work: StepWork) -> float:
        return 0.001 * work.num_tokens


def planned(shape: str, gpu: bool = True) -> PlannedModel:
    return plan_model(shape, shape_checkpoint(shape_config(shape), "bfloat16"), GpuFormat() if gpu else NativeFormat())


def outline(plan: StepPlan) -> tuple[Any, ...]:
    runs = [(run.row, run.start, run.count, len(run.drafts), run.new_blocks, run.quotas) for run in plan.runs]
    return plan.step, runs, plan.retired, [len(admission.tokens) for admission in plan.admitted]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000) for _ in range(rng.randint(5, 60))] for _ in range(4)]


def drive(add: Callable[[int], object], step: Callable[[], object], has_work: Callable[[], bool]) -> None:
    before_step = {0: [0, 1], 2: [2], 6: [3]}
    number = 0
    while has_work() or number <= max(before_step):
        for request in before_step.get(number, []):
            add(request)
        step()
        number += 1


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_fed_with_real_step_times_the_simulated_drafts_equal_the_real_ones(method: str) -> None:
    """The default model drafts for itself, which does not pay, so that the number of drafts is told; or every draft is
    told to be right. All are accepted."""
    path = resolve_model(DEFAULT_MODEL, progress=False).path
    drafts_itself = method == "draft_model"
    config = f'{{"model": "{path}", {ALWAYS}}}' if drafts_itself else f'{{"method": "ngram", {SYNTHETIC}}}'
    config = config.replace("}", ', "num_speculative_tokens": 3}')
    options = EngineOptions(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, target_itl_ms=20, threads=1,
        kv_cache_memory_bytes=64 << 20,
        speculative_config=config,
    )  # fmt: skip
    engine = Engine(new_executor(path, options), options)
    plans, outputs, seconds = [], [], []
    submit, collect = engine.executor.submit, engine.executor.collect
    engine.executor.submit = lambda plan: (plans.append(outline(plan)), submit(plan))[1]
    engine.executor.collect = lambda: (outputs.append(collect()), outputs[-1])[1]
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0, seed=0)
    drive(
        lambda number: engine.submit(Request(id=str(number), prompt_ids=prompts()[number], params=params)),
        lambda: (engine.step(), seconds.append(engine.record.run_seconds)),
        lambda: engine.has_work,
    )
    own = [in_all - output.draft_seconds for in_all, output in zip(seconds, outputs, strict=True)]
    replica = simulated(options, method, own)
    made = as_measured(replica, outputs if drafts_itself else [StepOutput(0, [])] * len(outputs))
    drive(
        lambda number: replica.add(SimulatedRequest(number, Arrival(0.0, prompts()[number], 16)), 0),
        replica.step,
        lambda: replica.scheduler.has_work,
    )
    assert sum(run[3] for plan in plans for run in plan[1]) > 20, "few drafts were verified"
    assert [outline(plan) for plan in made] == plans


def simulated(options: EngineOptions, method: str, seconds: list[float]) -> Replica:
    """The engine of these options, whose steps take so long."""
    model = plan_model("", open_checkpoint(resolve_model(DEFAULT_MODEL).path), NativeFormat())
    flags = EngineFlags(**{spec.name: getattr(options, spec.name) for spec in fields(EngineFlags)})
    draft = Draft(model, model.kv_spec("auto"), 3) if method == "draft_model" else None
    engine = plan_engine(model, LAPTOP, flags, num_speculative_tokens=3, acceptance=1.0, draft=draft)
    replica = replace(engine, draft_method=method).new_replica(
        0, RecordedTimes(seconds), draft_times=TokenTimes() if draft else None
    )
    speculation = replica.scheduler.speculation
    told = {"per_batch_size": ((1, 256, 3),)} if draft else {"synthetic": True}
    speculation.policy = replace(speculation.policy, **told)
    for quotas in speculation._quotas:
        quotas._policy = speculation.policy
    replica.goes_on = 0.0
    return replica


def as_measured(replica: Replica, outputs: list[StepOutput]) -> list[StepPlan]:
    """Let drafts compute what is simulated, and take what was measured. -> plans, as they are made"""
    plans: list[StepPlan] = []
    schedule, propose, real = replica.scheduler.schedule, replica._drafts.propose, iter(outputs)

    def as_in_the_engine(plan: StepPlan, output: StepOutput, known: dict[int, int]) -> None:
        propose(plan, output, known)
        measured = next(real)
        simulated_tokens = [num_tokens for num_tokens, _ in output.draft_steps.get("draft_model", [])]
        assert simulated_tokens == [num_tokens for num_tokens, _ in measured.draft_steps.get("draft_model", [])]
        output.draft_seconds, output.draft_steps = measured.draft_seconds, measured.draft_steps

    replica._drafts = type("Drafts", (), {"admit": replica._drafts.admit, "propose": staticmethod(as_in_the_engine)})()
    replica.scheduler.schedule = lambda: (plans.append(schedule()), plans[-1])[1]
    return plans


def test_a_draft_model_reads_what_is_new_and_a_head_all_that_was_sampled() -> None:
    for is_head, tokens in ((False, [2, 1, 1]), (True, [4, 1, 1])):
        steps = DraftingSteps(TokenTimes(), block_size=16, max_tokens=64, is_head=is_head)
        assert steps.propose({0: 20}, {0: 3})[1] == [(1, 0.001)] * 3
        steps.note(0, 3, 3)
        seconds, drafted = steps.propose({0: 24}, {0: 3})  # three were accepted, and one sampled
        assert [count for count, _ in drafted] == tokens and seconds == pytest.approx(0.001 * sum(tokens))


def test_a_long_text_is_read_in_steps_of_the_budget_before_it_is_drafted_from() -> None:
    steps = DraftingSteps(TokenTimes(), block_size=16, max_tokens=64)
    plan = StepPlan(0, [])
    assert steps.follow(plan, "draft_model") == 0
    steps.propose({0: 10}, {0: 1})
    seconds, drafted = steps.propose({0: 210}, {0: 2})  # 200 tokens since
    assert drafted == [(1, 0.001), (1, 0.001)] and seconds == pytest.approx(0.001 * (199 + 2))


@pytest.mark.parametrize(
    ("hardware", "shapes", "users"),
    [(LAPTOP, ("qwen3-8b", "qwen3-0.6b"), 1), (H200, ("llama-3.1-8b", ""), 1), (H200, ("llama-3.1-8b", ""), 8)],
)
def test_the_plan_and_the_simulation_agree_on_what_speculation_gains(
    hardware: Any, shapes: tuple[str, str], users: int
) -> None:
    """Drafts are nearly always right, so that the scheduler takes as many as it may. On a GPU, sequences that wait for
    drafts are verified together."""
    target, small = (planned(shape, hardware.is_gpu) for shape in (shapes[0], shapes[1] or shapes[0]))
    eight_bit, k, acceptance = not hardware.is_gpu, 3, 0.95
    kv, draft = target.kv_spec("auto"), Draft(small, small.kv_spec("auto"), k, is_head=not shapes[1])
    load = Load(users=users, context=2048, prompt=128, output=256)
    table = make_plan(target, kv, load, Setup(hardware=hardware, eight_bit=eight_bit), draft).speculation

    def tpot(count: int) -> float:
        engine = plan_engine(
            target, hardware, EngineFlags(), num_speculative_tokens=count, acceptance=acceptance,
            draft=draft if count else None,
        )  # fmt: skip
        times = roofline_times(target, "auto", hardware, eight_bit=eight_bit)
        fleet = Fleet(engine, times, draft_times=draft.times(hardware, eight_bit) if count else None)
        arrivals = generate(WorkloadSpec(rate=inf, num_requests=users, prompt=128, output=256, spread=0))
        return summarize(fleet.serve(arrivals)).tpot[50]

    assert tpot(0) / tpot(k) == pytest.approx(table.speedup(acceptance, k), rel=0.06)


def test_a_draft_model_that_is_as_large_as_the_model_gains_nothing() -> None:
    model = planned("llama-3.2-1b")
    draft = Draft(model, model.kv_spec("auto"), 3)
    times = roofline_times(model, "auto", H200)
    spec = WorkloadSpec(rate=0.01, num_requests=4, prompt=64, output=200, spread=0)
    plain = Fleet(plan_engine(model, H200, EngineFlags()), times)
    engine = plan_engine(model, H200, EngineFlags(), num_speculative_tokens=3, acceptance=0.9, draft=draft)
    drafted = Fleet(engine, times, draft_times=draft.times(H200, False))
    tpots = [summarize(fleet.serve(generate(spec))).tpot[50] for fleet in (plain, drafted)]
    assert 0.99 * tpots[0] < tpots[1] < 1.1 * tpots[0], "what is tried now and then is verified, too"


def test_steps_of_many_tokens_read_more_experts() -> None:
    model = planned("qwen3-30b-a3b")
    times, kv = roofline_times(model, "bfloat16", H200), model.kv_spec("bfloat16")
    for num_tokens in (1, 8, 64):
        shape = StepWork(num_tokens, num_tokens, num_tokens, num_tokens)
        read = model.step(StepShape(num_tokens, 1, 1), kv).count.total.weight_bytes
        assert times.seconds(shape) - times.overhead == pytest.approx(read / times.bandwidth, rel=0.01)

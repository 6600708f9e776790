"""The simulator plans what the engine plans."""

import json
import random
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from quire.core.errors import BadRequest
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.planning.fleet import EngineFlags, plan_engine
from quire.planning.hardware import find_hardware
from quire.planning.packed_bytes import NativeFormat
from quire.planning.planned_model import plan_model
from quire.planning.replica import LAUNCHED, Replica
from quire.planning.routers import by_prefix, least_busy, power_of_two, round_robin
from quire.planning.server_loop import Incoming, Message, ServerLoop
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import shape_config
from quire.planning.simulated_request import SimulatedRequest
from quire.planning.simulator import Simulation, _Clock, simulate
from quire.planning.step_times import SHARES, ServingCosts, StepWork
from quire.planning.summary import summarize
from quire.planning.workload import Arrival, WorkloadSpec, generate, read_trace
from quire.weights.checkpoint import open_checkpoint


class RecordedTimes:
    """Plays back measured step times."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)

    def seconds(self, work: StepWork) -> float:
        return next(self._seconds)


class FixedTimes:
    def seconds(self, work: StepWork) -> float:
        return 0.01 + 0.001 * work.num_tokens


class SlowedTimes(FixedTimes):
    """Of a GPU that is slower after it computed much."""

    def seconds(self, work: StepWork) -> float:
        return super().seconds(work) + 1e-5 * work.recent


def new_replica(index: int = 0, num_blocks: int = 1000, ahead: int = 0, **limits: int) -> Replica:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024, **limits}
    return Replica(index, Scheduler(SchedulerLimits(**given), num_blocks, ahead=ahead), FixedTimes(), ahead=ahead)


def outline(plan: StepPlan) -> tuple:
    """All of a plan but token ids."""
    runs = [(run.row, run.start, run.count, run.new_blocks) for run in plan.runs]
    admitted = [(admission.row, len(admission.tokens), admission.blocks) for admission in plan.admitted]
    return plan.step, runs, plan.retired, plan.copies, plan.swap_out, plan.swap_in, admitted


@pytest.mark.parametrize("given", [{}, {"swap_space": 0.01, "scheduling_policy": "priority"}])
def test_fed_with_real_step_times_the_simulated_plans_equal_the_real_ones(given: dict) -> None:
    options = EngineOptions(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, target_itl_ms=20, kv_cache_memory_bytes=6 << 20,
        threads=1, **given,
    )  # fmt: skip
    engine = Engine(new_executor(resolve_model(DEFAULT_MODEL, progress=False).path, options), options)
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(40)]
    requests = [
        Request(
            id=str(number),
            prompt_ids=prefix[: rng.choice((0, 40))] + [rng.randrange(1000) for _ in range(rng.randint(5, 90))],
            params=SamplingParams(max_tokens=rng.randint(20, 50), ignore_eos=True, temperature=0, seed=0),
            priority=rng.randrange(3),
        )
        for number in range(12)
    ]
    before_step = {0: requests[:3], 2: requests[3:4], 9: requests[4:9], 10: requests[9:]}
    plans, seconds, submit = [], [], engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(outline(plan)), submit(plan))[1]
    step = 0
    while engine.has_work or step <= max(before_step):
        for request in before_step.get(step, []):
            engine.submit(request)
        engine.step()
        seconds.append(engine.record.run_seconds)
        step += 1
    model = plan_model("", open_checkpoint(resolve_model(DEFAULT_MODEL).path), NativeFormat())
    flags = {spec.name: getattr(options, spec.name) for spec in fields(EngineFlags)}
    planned = plan_engine(model, find_hardware("laptop-8-cores"), EngineFlags(**flags))
    replica, simulated = planned.new_replica(0, RecordedTimes(seconds)), []
    scheduler = replica.scheduler
    schedule = scheduler.schedule
    scheduler.schedule = lambda: (simulated.append(schedule()), simulated[-1])[1]
    outlines, step, replica.goes_on = [], 0, 0.0
    while scheduler.has_work or step <= max(before_step):
        for request in before_step.get(step, []):
            asked = Arrival(0.0, request.prompt_ids, request.params.max_tokens, request.priority)
            replica.add(SimulatedRequest(int(request.id), asked), 0)
        replica.step()
        outlines.append(outline(simulated[-1]))
        step += 1
    assert engine._scheduler.num_preemptions > 0, "nothing of interest happened"
    assert engine.stats().prefix_hits > 0 or not options.enable_prefix_caching
    assert bool(engine.capacity.num_host_blocks) == any(plan[4] for plan in plans), "nothing was swapped out"
    assert outlines == plans


@pytest.mark.parametrize("hardware", ["epyc-9654", "h200"])
def test_an_engine_has_window_pages_where_only_some_layers_have_windows(hardware: str) -> None:
    model = plan_model("", shape_checkpoint(shape_config("gpt-oss-20b")), NativeFormat())
    flags = EngineFlags(max_num_seqs=8, max_model_len=4096, kv_cache_memory_bytes=1 << 30)
    engine = plan_engine(model, find_hardware(hardware), flags)
    assert engine.num_pages and engine.page_window == 128
    whole = (1 << 30) // model.kv_spec("bfloat16").block_bytes
    assert engine.num_blocks > 1.5 * whole
    replica = engine.new_replica(0, FixedTimes())
    arrivals = [Arrival(0.0, list(range(number, number + 500)), 20) for number in range(12)]
    assert all(request.finished for request in simulate(arrivals, [replica]).requests)
    replica.scheduler.check()


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_request_gets_all_its_tokens_in_order(ahead: int) -> None:
    arrivals = generate(WorkloadSpec(rate=5, num_requests=40, prompt=60, output=20, spread=0.5, shared_prefix=32))
    simulation = simulate(arrivals, [new_replica(ahead=ahead)])
    assert len(simulation.requests) == 40
    for request in simulation.requests:
        assert request.arrival < request.first_token <= request.finished
    summary = summarize(simulation)
    assert summary.hit_rate > 0.2 and 0 < summary.utilization <= 1
    assert summary.output_tokens_per_second * summary.seconds == pytest.approx(sum(a.output for a in arrivals))


def test_an_idle_engine_answers_at_once() -> None:
    arrivals = [Arrival(1.0, [1, 2, 3], 2), Arrival(100.0, [4, 5], 1)]
    first, second = simulate(arrivals, [new_replica()]).requests
    assert first.ttft == pytest.approx(0.013) and first.tpot == pytest.approx(0.011)
    assert second.latency == pytest.approx(0.012)


def test_requests_that_come_together_reach_the_engine_one_after_the_other() -> None:
    """An idle engine begins with the first, and the others share its next steps."""
    replica = new_replica()
    replica.costs = ServingCosts(request=0.004, arrival=0.001)
    arrivals = [Arrival(1.0, [number, 2, 3], 1) for number in range(3)]
    first, *others = simulate(arrivals, [replica]).requests
    assert first.latency == pytest.approx(0.004 + 0.013)
    assert [each.latency for each in others] == pytest.approx([0.004 + 0.013 + 2 * 0.001 + 0.016] * 2)
    apart = [new_replica(index) for index in range(2)]
    for each in apart:
        each.costs = ServingCosts(request=0.004)
    assert [each.ttft for each in simulate(arrivals[:2], apart).requests] == pytest.approx([0.017, 0.017])


def test_a_gpu_waits_for_the_loop_of_its_engine_where_that_takes_longer() -> None:
    arrivals = [Arrival(0.0, [1, 2, 3], 21)]
    for step, tpot in ((0.002, 0.011), (0.030, 0.030)):
        replica = new_replica(ahead=1)
        replica.costs = ServingCosts(step=step, prompts=0.004)
        (request,) = simulate(arrivals, [replica]).requests
        begun = LAUNCHED * (step + 0.004)  # before the turn has ended
        assert request.ttft == pytest.approx(begun + 0.013 if step < 0.01 else 2 * step + 0.004)
        assert request.tpot == pytest.approx(tpot, rel=0.1)


def test_the_server_of_a_gpu_does_one_thing_after_the_other() -> None:
    costs = ServingCosts(request=0.008, taken=0.002, message=0.001, stream=0.002, write=0.001)
    replica = new_replica(ahead=1)
    replica.costs = costs
    arrivals = [Arrival(1.0, [1, 2, 3], 1), Arrival(1.0, [4, 5, 6], 1)]
    [alone] = simulate(arrivals[:1], [replica]).requests
    assert costs.way == pytest.approx(0.008 - 0.75 * 0.002 - 0.004)
    assert alone.ttft == pytest.approx(0.008 + 0.013), "as it is measured of a request that is alone"
    replica = new_replica(ahead=1)
    replica.costs = costs
    first, second = simulate(arrivals, [replica]).requests
    accepted, read, submitted = (share * 0.002 for share in SHARES)
    taken = costs.way + 2 * accepted + 2 * read + submitted
    assert first.ttft == pytest.approx(taken + 0.013 + 0.004), "both are read before"
    assert second.ttft == pytest.approx(taken + 0.013 + 0.013 + 0.004)


def asked_at(time: float, num_prompt: int = 9) -> Incoming:
    return Incoming(time, 0, Arrival(time, range(num_prompt), 1))


def told_at(time: float, num_sampled: int, *ended: SimulatedRequest) -> Message:
    return Message(time, num_sampled, [], list(ended))


def test_a_server_takes_a_request_in_several_turns() -> None:
    server = ServerLoop(ServingCosts(taken=0.010, prompt_token=1e-4, message=0.1))
    assert server.next_turn == inf and not server.is_awaited
    server.receive(asked_at(1.0, 50))
    assert server.next_turn == 1.0 and server.is_awaited
    server.run(1.0)
    assert server.next_turn == pytest.approx(1.0015)
    server.receive(asked_at(1.0001))
    server.tell(told_at(1.002, 1))
    server.run(1.0016)
    assert not server.take_submitted() and server.next_turn == pytest.approx(1.0015 + 0.003)
    server.run(1.0046)
    [submitted] = server.take_submitted()
    assert submitted.time == pytest.approx(1.0045 + 0.1 + 0.0015 + 0.0045 + 0.005), "a message was passed on before"
    server.run(2.0)
    [submitted] = server.take_submitted()
    assert submitted.time == pytest.approx(1.1155 + 0.0025 + 0.0045 + 0.0009), "the first one's answer began before"
    assert not server.is_awaited


def test_messages_that_came_together_are_one_write_for_each_stream() -> None:
    first, second = (SimulatedRequest(number, Arrival(0.0, [1], 9)) for number in range(2))
    server = ServerLoop(ServingCosts(message=0.001, stream=1e-4, write=1e-3))
    for time in (1.0, 1.002, 1.004):
        server.tell(told_at(time, 5))
    server.tell(told_at(1.006, 4, first))
    server.run(0.9)
    assert server.is_awaited and not server.take_ended()
    server.run(1.0)
    assert server.next_turn == pytest.approx(1.0 + 0.001 + 5e-4 + 5e-3)
    server.run(1.1)
    assert server.take_ended() == [first] and not server.is_awaited
    assert first.finished == pytest.approx(1.0065 + 0.003 + 14e-4 + 5e-3)
    server.tell(told_at(2.0, 1, second))
    server.run(2.0)
    assert second.finished == pytest.approx(2.0 + 0.001 + 1e-4 + 1e-3)


def test_a_step_knows_what_the_device_computed_just_before() -> None:
    rates = []

    class Times(FixedTimes):
        def seconds(self, work: StepWork) -> float:
            rates.append(work.recent)
            return super().seconds(work)

    replica = new_replica(ahead=1)
    replica._times = Times()
    simulate([Arrival(0.0, list(range(300)), 4), Arrival(5.0, [1, 2], 1)], [replica])
    assert rates[0] == 0 and max(rates) > 700 and rates[-1] == 0


def test_two_replicas_serve_twice_as_much() -> None:
    arrivals = generate(WorkloadSpec(rate=float("inf"), num_requests=64, prompt=100, output=30))
    one = summarize(simulate(arrivals, [new_replica()]))
    two = summarize(simulate(arrivals, [new_replica(0), new_replica(1)], round_robin))
    assert two.output_tokens_per_second == pytest.approx(2 * one.output_tokens_per_second, rel=0.1)


def test_many_replicas_at_once_are_as_each_step_by_itself() -> None:
    spec = WorkloadSpec(rate=20, num_requests=120, prompt=40, output=50, spread=0.8, turns=2, think_seconds=0.3)
    results = [
        everything_of(_Clock(generate(spec), [new_replica(i) for i in range(4)], power_of_two, compress=c).run())
        for c in (False, True)
    ]
    assert results[0] == results[1]


def test_a_thousand_replicas_serve_as_each_of_them_would() -> None:
    arrivals = generate(WorkloadSpec(rate=3000, num_requests=3000, prompt=20, output=8))
    simulation = simulate(arrivals, [new_replica(i, num_blocks=64) for i in range(1000)], round_robin)
    assert set(Counter(request.replica for request in simulation.requests).values()) == {3}
    assert all(request.ttft == pytest.approx(0.03) for request in simulation.requests), "no two wait for each other"
    assert not any(replica.load for replica in simulation.replicas)


def test_routing_by_prefix_finds_prefixes_again() -> None:
    spec = WorkloadSpec(rate=2, num_requests=60, prompt=20, output=4, shared_prefix=128, num_prefixes=12)
    arrivals = generate(spec)
    hits = {
        router.__name__: summarize(simulate(arrivals, [new_replica(i) for i in range(4)], router)).hit_rate
        for router in (round_robin, least_busy, by_prefix)
    }
    assert hits["by_prefix"] > hits["round_robin"] + 0.1


def test_the_next_turn_comes_after_the_answer_and_finds_its_history() -> None:
    spec = WorkloadSpec(num_requests=6, turns=3, prompt=16, output=17, think_seconds=2)
    simulation = simulate(generate(spec), [new_replica()])
    lengths = sorted(request.num_prompt for request in simulation.requests)
    assert lengths == [16, 16, 49, 49, 82, 82]
    chain = sorted((r for r in simulation.requests if r.asked.prompt_ids[0] == 1), key=lambda r: r.arrival)
    for before, after in pairwise(chain):
        assert after.arrival == pytest.approx(before.finished + 2)
        known = before.num_prompt + 16  # the last token of an answer is not in the cache
        assert after.num_cached == known - known % 16


def everything_of(simulation: Simulation) -> list[tuple]:
    return [
        (r.number, r.arrival, r.first_token, r.finished, r.num_cached)
        for r in sorted(simulation.requests, key=lambda request: request.number)
    ]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_made_at_once_change_nothing(ahead: int, seed: int) -> None:
    """Every plan that is still made is the one with its number among those made one by one; so is every time."""
    spec = WorkloadSpec(
        rate=4, num_requests=60, prompt=40, output=60, spread=0.9, shared_prefix=32, num_prefixes=3, seed=seed,
        turns=1 + seed % 3, think_seconds=0.5, priorities=2, burst=1 + seed // 2,
    )  # fmt: skip
    plans, results, num_blocks = [], [], (40, 60, 400)[seed % 3]
    for compress in (False, True):
        replica = new_replica(num_blocks=num_blocks, ahead=ahead, max_num_seqs=6)
        server = (
            {
                "prompts": 0.0004,
                "taken": 0.0003,
                "prompt_token": 1e-6,
                "message": 0.0001,
                "stream": 0.00002,
                "write": 0.00003,
            }
            if ahead
            else {}
        )
        replica.costs = ServingCosts(0.001, 0.0001, 0.002, 0.0005, **server)
        replica._times = SlowedTimes()
        made, schedule = {}, replica.scheduler.schedule

        def noted(made: dict = made, schedule=schedule) -> StepPlan:
            plan = schedule()
            made[plan.step] = outline(plan)[:2] + outline(plan)[3:]  # rows are retired in plans that are not made
            return plan

        replica.scheduler.schedule = noted
        clock = _Clock(generate(spec), [replica], least_busy, compress=compress)
        results.append(everything_of(clock.run()))
        plans.append(made)
        replica.scheduler.check()
    one_by_one, compressed = plans
    assert len(compressed) < 0.95 * len(one_by_one), "few steps were made at once"
    for number, plan in compressed.items():
        assert plan == one_by_one[number]
    assert results[0] == results[1]


def test_a_trace_is_read_and_a_wrong_one_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0.5, "input_length": 3, "output_length": 2},
        {"arrival": 1, "prompt_tokens": 1, "output_tokens": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path)
    assert (first.time, len(first.prompt_ids), first.output, second.time) == (0.5, 3, 2, 1.0)
    mooncake = {"timestamp": 2000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}
    path.write_text(json.dumps(mooncake))
    (request,) = read_trace(path)
    assert request.time == 2.0 and list(request.prompt_ids[:512]) == list(range(7 * 512, 8 * 512))
    for wrong, message in (
        ("\n".join(json.dumps({"timestamp": at, "input_length": 1, "output_length": 1}) for at in (2, 1)),
         "line 2 comes at 1 s, before"),
        ("\n".join(json.dumps({"timestamp": at, "input_length": 1, "output_length": 1}) for at in (2, 2e6)),
         "line 2 comes 1,999,998 s after"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n\n{"timestamp": 2}', "line 2 is empty"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n[1]', "line 2 is not a request"),
        ('{"timestamp": 1, "input_length": 1e9, "output_length": 1}', "line 1 has 1,000,000,001 tokens"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 1 comes at -1 s"),
        ('{"input_length": 1}', "line 1 is not a request"),
        ("", "no requests"),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(BadRequest, match=message):
            read_trace(path)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0.5,1a,2,GPT-4,417,276,693,"Conversation, long"
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,10,20\n2,11,21\n"


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (AZURE, [(0, 374, 44), (4.314579, 396, 109)]),
        (AZURE_2024, [(0, 2162, 5), (0.007405, 2399, 6)]),
        (BURSTGPT, [(0, 472, 18), (113, 417, 276)]),
        (BURSTGPT_3, [(0, 417, 276)]),
        (VIDUR, [(0, 10, 20), (0.5, 11, 21)]),
        ("\ufeff" + VIDUR.replace("\n", "\r\n"), [(0, 10, 20), (0.5, 11, 21)]),
    ],
)
def test_published_traces_are_read_as_they_are(tmp_path: Path, text: str, requests: list) -> None:
    """Times count from the first. Requests that failed have no tokens, and are left out."""
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8", newline="")
    arrivals = read_trace(path)
    assert [(len(each.prompt_ids), each.output) for each in arrivals] == [tuple(row[1:]) for row in requests]
    assert [each.time for each in arrivals] == pytest.approx([row[0] for row in requests])


def test_requests_of_one_model_are_taken_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(BURSTGPT)
    assert [len(each.prompt_ids) for each in read_trace(tmp_path / "trace.csv", model="GPT-4")] == [417]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,words\n1,2\n", "line 1 is neither JSON nor the names of a trace's columns"),
        (f"{AZURE}2023-11-16 18:15:40.0,5,5\n", "line 4 comes at -6.68059 s"),
        (f"{AZURE}2023-11-16 18:15:49.0,5,5\n", "line 4 comes at 2.31941 s, before the line above it"),
        (f"{AZURE}yesterday,5,5\n", "line 4 is not a request"),
        (f"{AZURE}6.5,5,5\n", "line 4 is not a request"),
        (f"{AZURE}2023-11-16 18:15:51.0,many,5\n", "line 4 is not a request"),
        (f"{AZURE}2023-11-16 18:15:51.0,5\n", "line 4 is not a request"),
        (f"{AZURE}2023-11-16 18:15:51.0,5.5,5\n", "line 4 is not a request"),
        (f"{AZURE}2023-11-16 18:15:51.0+00:00,5,5\n", "line 4 is not a request"),
        (f"{AZURE}2023-11-18 18:15:51.0,5,5\n", "line 4 comes 172,800 s after"),
        (f"{AZURE}2023-11-16 18:15:51.0,-5,5\n", "line 4 has -5 tokens of a prompt"),
        (VIDUR.partition("\n")[0], "has no requests"),
    ],
)
def test_a_csv_trace_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(BadRequest, match=message):
        read_trace(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": -1}, "rate is -1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"spread": 2}, "spread is 2"),
        ({"think_seconds": -1}, "think_seconds is -1"),
        ({"turns": 501}, "turns is 501"),
        ({"prompt": 10**9}, "tokens"),
    ],
)
def test_an_impossible_workload_is_refused_by_name(given: dict, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        WorkloadSpec(**given)

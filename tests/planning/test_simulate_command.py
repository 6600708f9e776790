"""`quire simulate`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.main import INTERRUPTED, main
from quire.core.errors import BadRequest
from quire.planning.fleet import Fleet, SimulatedEngine
from quire.planning.simulator import Simulation, simulate
from quire.planning.step_times import StepWork
from quire.planning.summary import Summary, summarize
from quire.planning.workload import Arrival, WorkloadSpec, generate

TARGET = ["simulate", "--shape", "llama-3.1-8b", "--hardware", "h200", "--num-requests", "30", "--prompt", "64"]

DRAFTS = ["--num-speculative-tokens", "3", "--acceptance", "0.9"]


class FixedTimes:
    def seconds(self, work: StepWork) -> float:
        return 0.01 + 0.0005 * work.num_tokens


def serve(spec: WorkloadSpec, **given: object) -> Summary:
    engine = SimulatedEngine(**{"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 128, **given})
    return summarize(simulate(generate(spec), [engine.new_replica(0, FixedTimes())]))


CROWD = WorkloadSpec(rate=float("inf"), num_requests=24, prompt=60, output=60)


def test_the_table_and_the_picture_have_a_row_for_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TARGET, "--rates", "1,50", "--svg", str(tmp_path / "load.svg")]) == 0
    printed = capsys.readouterr()
    *_, slow, fast = printed.out.splitlines()
    assert slow.split()[0] == "1" and fast.split()[0] == "50"
    assert "computed from the rates of h200" in printed.err
    assert (tmp_path / "load.svg").read_text().count("<polyline") >= 4


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_interrupted_simulation_keeps_the_loads_that_are_done(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Fleet.serve

    def interrupted(fleet: Fleet, arrivals: list[Arrival], advance: Callable[[], object]) -> Simulation:
        if arrivals[-1].time < 1:  # the second load
            raise KeyboardInterrupt
        return served(fleet, arrivals, advance)

    monkeypatch.setattr(Fleet, "serve", interrupted)
    picture = tmp_path / "load.svg"
    assert main([*TARGET, *flags, "--rates", "1,50", "--svg", str(picture)]) == INTERRUPTED
    printed = capsys.readouterr().out
    if flags:
        assert [load["rate"] for load in json.loads(printed)["loads"]] == [1]
    else:
        assert [line.split()[0] for line in printed.splitlines()[2:]] == ["1"]
    assert picture.read_text().count("<circle") == 4


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TARGET, "--json", "--price", "2", "--replicas", "2", "--router", "power-of-two"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (load,) = printed["loads"]
    assert load["cost"]["per_hour"] == 4 and load["num_requests"] == 30 and set(load["latency"]) == {"50", "90", "99"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "-1"], "rate is -1"),
        (["--router", "rond-robin"], "did you mean round-robin?"),
        (["--rates", "1,x"], "write numbers with commas"),
        (["--svg", "nowhere/load.svg"], "there is no folder to put nowhere/load.svg into"),
        (["--svg", "load.png"], "write load.svg"),
        (["--rates", "1,inf", "--svg", "load.svg"], "a rate is inf"),
        (["--svg", "."], ". is a folder"),
        (["--rate", "1", "--rates", "1,2"], "--rate and --rates are given"),
        (["--num-prompts", "100m"], "at most 10,000,000"),
        (["--output", "1x"], "`1x` is not a whole number"),
        (["--trace", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--num-speculative-tokens", "3"], "--acceptance 0.7"),
        (["--num-speculative-tokens", "3", "--acceptance", "2"], "acceptance is 2.0"),
        (["--acceptance", "0.7"], "--num-speculative-tokens 3"),
        (["--draft-model", "llama-3.2-1b"], "--num-speculative-tokens 3"),
        ([*DRAFTS, "--draft-model", "qwen3-0.6b"], "has 151,936 logits, and the model 128,256"),
        ([*DRAFTS, "--draft-model", "llama-3.2-1b", "--draft-head"], "one of them"),
        (["--price", "-1"], "--price is -1"),
        (["--rates", "1,-2"], "rate is -2"),
        (["--rates", ""], "write numbers with commas"),
        (["--calibrate"], "--calibrate runs the model here"),
        (["--prompt", "200000"], "tokens, and the context holds 131,072\nhint: give a smaller --prompt, --output"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--goodput", "ttft"], "write NAME:VALUE"),
        (["--goodput", "ttf:500"], "did you mean `ttft`?"),
        (["--scheduling-policy", "lifo"], "fcfs"),
        (["--kv-cache-memory-bytes", "1MiB", "--max-model-len", "4096"], "kv_cache_memory_bytes"),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([*TARGET, *flags])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr().err
    assert status and message in printed and "Traceback" not in printed


@pytest.mark.parametrize("flags", [["--draft-model", "llama-3.2-1b"], ["--draft-head"]])
def test_what_drafts_takes_time(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    tpots = []
    for drafted in ([], flags):
        assert main([*TARGET, *DRAFTS, *drafted, "--rate", "0.1", "--num-requests", "6", "--json"]) == 0
        printed = capsys.readouterr()
        tpots.append(json.loads(printed.out)["loads"][0]["tpot"]["50"])
    assert 1.2 * tpots[0] < tpots[1] < 3 * tpots[0]
    assert "llama-3.2-1b, too" in printed.err or "a head of one layer, too" in printed.err


def test_only_a_model_that_is_here_is_calibrated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "llama-3.1-8b", "--calibrate"])
    assert "--calibrate runs the model here" in capsys.readouterr().err


def test_a_trace_is_simulated_at_its_own_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"timestamp": 0.1 * i, "input_length": 50, "output_length": 10} for i in range(40)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([*TARGET, "--trace", str(tmp_path / "trace.jsonl"), "--json"]) == 0
    printed = capsys.readouterr()
    assert "no effect: --num-requests, --prompt; the requests are those of" in printed.err
    (load,) = json.loads(printed.out)["loads"]
    assert load["num_requests"] == 40 and load["rate"] == pytest.approx(10, rel=0.1)


def test_flags_are_those_of_the_command_that_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """`quire bench serve`, and so vLLM's."""
    loads = []
    for flags in (
        ["--rate", "9", "--num-requests", "20", "--prompt", "40", "--output", "9", "--spread", "0.1", "--burst", "2"],
        ["--request-rate", "9", "--num-prompts", "20", "--random-input-len", "40", "--random-output-len", "9",
         "--random-range-ratio", "0.1", "--simulated-burst", "2"],
    ):  # fmt: skip
        assert main([*TARGET[:5], *flags, "--json"]) == 0
        loads.append(json.loads(capsys.readouterr().out)["loads"])
    assert loads[0] == loads[1]


def test_a_trace_with_a_request_beyond_the_context_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"timestamp": i, "input_length": 50 + 200_000 * i, "output_length": 10} for i in range(2)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([*TARGET, "--trace", str(tmp_path / "trace.jsonl")]) == 2
    printed = capsys.readouterr()
    assert "line 2 has 200,060 tokens, and the context holds 131,072" in printed.err and not printed.out


def test_a_csv_trace_is_simulated_and_refused_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"2023-11-16 18:15:{46 + i // 10}.{i % 10}805900,{50 + i},{i % 9}" for i in range(40)
    ]  # some have no answer
    (tmp_path / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert main([*TARGET, "--trace", str(tmp_path / "azure.csv"), "--json"]) == 0
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert load["num_requests"] == 35
    rows.append("2023-11-16 18:15:51.0,200000,9")
    (tmp_path / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert main([*TARGET, "--trace", str(tmp_path / "azure.csv")]) == 2
    assert "line 42 has 200,009 tokens" in capsys.readouterr().err


def test_requests_beyond_the_concurrency_wait_at_their_clients() -> None:
    """With one in flight each is served alone, and its times count from when it was sent."""
    engine = SimulatedEngine(num_blocks=400)
    arrivals = generate(WorkloadSpec(rate=float("inf"), num_requests=12, prompt=60, output=20))
    one, four, all_at_once = (Fleet(engine, FixedTimes(), max_concurrency=limit) for limit in (1, 4, None))
    alone = one.serve(arrivals)
    assert {round(request.latency, 9) for request in alone.requests} == {round(alone.requests[0].latency, 9)}
    assert alone.seconds == pytest.approx(sum(request.latency for request in alone.requests))
    assert [request.number for request in alone.requests] == list(range(12))
    times = [(request.arrival, request.finished) for request in four.serve(arrivals).requests]
    assert max(sum(begin <= other < end for begin, end in times) for other, _ in times) == 4
    assert all_at_once.serve(arrivals).seconds < four.serve(arrivals).seconds < alone.seconds


def test_the_next_turn_of_a_conversation_counts_among_those_in_flight() -> None:
    engine = SimulatedEngine(num_blocks=400)
    arrivals = generate(WorkloadSpec(rate=float("inf"), num_requests=12, prompt=30, output=9, turns=3, think_seconds=0))
    served = Fleet(engine, FixedTimes(), max_concurrency=2).serve(arrivals).requests
    times = [(request.arrival, request.finished) for request in served]
    assert len(served) == 12 and max(sum(begin <= other < end for begin, end in times) for other, _ in times) == 2


def test_goodput_counts_what_keeps_all_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = simulate(
        generate(CROWD), [SimulatedEngine(num_blocks=400, max_num_seqs=16).new_replica(0, FixedTimes())]
    )
    ttfts = sorted(request.ttft for request in simulation.requests)
    half = summarize(simulation, {"ttft": ttfts[11]})
    assert half.goodput == pytest.approx(half.requests_per_second * sum(each <= ttfts[11] for each in ttfts) / 24)
    assert summarize(simulation, {"ttft": ttfts[11], "tpot": 0.0}).goodput == 0
    assert summarize(simulation).goodput is None
    assert main([*TARGET, "--goodput", "ttft:10000", "e2el:1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "0.00"


def test_a_small_cache_preempts_and_swap_space_keeps_what_was_computed() -> None:
    tight = {"num_blocks": 40, "max_model_len": 256}
    roomy, preempted = serve(CROWD), serve(CROWD, **tight)
    swapped = serve(CROWD, **tight, num_host_blocks=400, prefix_caching=False)
    computed_again = serve(CROWD, **tight, prefix_caching=False)
    assert roomy.preemptions == 0 < preempted.preemptions
    assert preempted.output_tokens_per_second < roomy.output_tokens_per_second
    assert swapped.output_tokens_per_second > computed_again.output_tokens_per_second


@pytest.mark.parametrize("ahead", [0, 1])
def test_accepted_drafts_save_steps(ahead: int) -> None:
    spec = WorkloadSpec(rate=1, num_requests=6, prompt=30, output=100)
    plain = serve(spec, ahead=ahead)
    drafted = serve(spec, ahead=ahead, num_speculative_tokens=3, acceptance=0.9)
    hopeless = serve(spec, ahead=ahead, num_speculative_tokens=3, acceptance=0.0)
    assert drafted.tpot[50] < 0.7 * plain.tpot[50]
    assert hopeless.tpot[50] < 1.2 * plain.tpot[50], "the scheduler stops drafting where nothing is accepted"


def test_priorities_decide_who_waits() -> None:
    arrivals = generate(WorkloadSpec(rate=float("inf"), num_requests=60, prompt=60, output=30, priorities=2))
    engine = SimulatedEngine(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=128, policy="priority")
    simulation = simulate(arrivals, [engine.new_replica(0, FixedTimes())])
    waited = {level: [r.ttft for r in simulation.requests if r.asked.priority == level] for level in (0, 1)}
    assert max(waited[0]) < min(waited[1])


def test_a_shared_prefix_pays_only_with_the_prefix_cache() -> None:
    spec = WorkloadSpec(rate=5, num_requests=20, prompt=16, output=8, shared_prefix=256)
    assert serve(spec).hit_rate > 0.8 and serve(spec, prefix_caching=False).hit_rate == 0


def test_impossible_drafts_are_refused() -> None:
    with pytest.raises(BadRequest, match="num_speculative_tokens is -1"):
        SimulatedEngine(num_blocks=10, num_speculative_tokens=-1)

"""Figures of a load worked out by hand; arrivals and datasets, without a server."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.cli.bench.serve.arrivals import arrival_times
from quire.cli.bench.serve.datasets import LoadRequest, read_requests
from quire.cli.bench.serve.flags import DatasetFlags, LoadFlags, ResultFlags
from quire.cli.bench.serve.generator import LoadRun, Outcome
from quire.cli.bench.serve.measures import details, figures_of, measured, peak_concurrency, peak_rate
from quire.cli.bench.serve.prompt_tokens import PromptTokens
from quire.cli.bench.serve.report import table
from quire.cli.bench.serve.stream import StreamedAnswer
from quire.cli.parser import UsageError
from quire.planning.workload import WorkloadSpec, generate
from quire.text.tokenizers.tokenizer import Tokenizer


def outcome(index: int, sent: float, moments: list[float], num_prompt: int | None, num_output: int | None) -> Outcome:
    answer = StreamedAnswer(sent, moments, moments[-1], num_prompt, num_output, "a b c")
    return Outcome(index, sent, answer.ended, 0.0, answer)


def two_and_a_failure() -> LoadRun:
    """From 10 s on: 3 tokens at 100, 200, 400 ms; 5 tokens in 2 chunks at 300 and 1,100 ms; a failure."""
    return LoadRun(
        [
            outcome(0, 10.0, [10.1, 10.2, 10.4], 7, 3),
            Outcome(2, 10.0, 10.5, 0.0, None, "status 500: no"),
            outcome(1, 10.0, [10.3, 11.1], 9, 5),
        ],
        begin=10.0,
    )


def test_figures() -> None:
    run = two_and_a_failure()
    requests = measured(run.outcomes, [7, 9, 8], lambda text: None)
    figures = figures_of(run, requests, (50, 99), {"ttft": 250.0})
    assert (figures["completed"], figures["failed"], figures["failures"]) == (2, 1, {"status 500: no": 1})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (16, 8)
    expected = {
        "duration": 1.1,
        "request_throughput": 2 / 1.1,
        "request_goodput": 1 / 1.1,
        "output_throughput": 8 / 1.1,
        "total_token_throughput": 24 / 1.1,
        "max_output_tokens_per_s": 5.5,  # in the first second 3, and one of two chunks of 5
        "max_concurrent_requests": 3,
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 100.0,
        "std_ttft_ms": 100.0,
        "p99_ttft_ms": 300.0,
        "mean_tpot_ms": (150 + 200) / 2,
        "p50_tpot_ms": 150.0,
        "p99_tpot_ms": 200.0,
        "mean_itl_ms": (100 + 200 + 800) / 3,
        "p50_itl_ms": 200.0,
        "mean_e2el_ms": (400 + 1100) / 2,
        "p99_e2el_ms": 1100.0,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)


def test_details_are_in_the_order_of_the_dataset() -> None:
    run = two_and_a_failure()
    rows = details(run, measured(run.outcomes, [7, 9, 8], lambda text: None))
    assert rows["input_lens"] == [7, 9, 0] and rows["output_lens"] == [3, 5, 0]
    assert rows["errors"] == ["", "", "status 500: no"] and rows["generated_texts"] == ["a b c", "a b c", ""]
    assert rows["ttfts"] == pytest.approx([0.1, 0.3, 0]) and rows["itls"][2] == []


def test_a_load_without_answers_has_no_latencies() -> None:
    run = LoadRun([Outcome(0, 1.0, 1.5, 0.0, None, "why")], begin=1.0)
    figures = figures_of(run, [], (50,), {})
    assert figures["mean_ttft_ms"] is None and figures["p50_itl_ms"] is None and figures["output_throughput"] == 0
    spent = {"peak_rss_bytes": None, "peak_gpu_used_bytes": None, "cpu_energy_joules": None, "gpu_energy_joules": None}
    figures |= spent | {"not_measured": dict.fromkeys(spent, "because"), "notes": []}
    told = table(figures, LoadFlags(), ResultFlags())
    assert "     1 x why" in told and not any("TTFT" in line for line in told)
    assert any(line.endswith("- (because)") for line in told)


def test_tokens_are_counted_by_the_server_else_by_the_tokenizer_else_in_chunks() -> None:
    told, untold = outcome(0, 0.0, [0.1, 0.2], 4, 9), outcome(1, 0.0, [0.1, 0.2], None, None)

    def counts(one: Outcome, counted: int | None) -> tuple[int, int]:
        [each] = measured([one], [70, 80], lambda text: counted)
        return each.num_prompt, each.num_output

    assert counts(told, 3) == (4, 9)
    assert counts(untold, 3) == (80, 3)
    assert counts(untold, None) == (80, 2)


def test_requests_that_follow_each_other_are_not_in_flight_together() -> None:
    spans = [(0.0, 2.0), (2.0, 3.0), (1.0, 2.5)]
    assert peak_concurrency([Outcome(0, sent, ended, 0.0) for sent, ended in spans]) == 2
    assert peak_concurrency([]) == 0 and peak_rate([], 0.0) == 0


# ---- when


def load(**values: Any) -> LoadFlags:
    return LoadFlags(**values)


def test_all_at_once() -> None:
    assert arrival_times(load(), 3, seed=0) == [0, 0, 0]


def test_a_rate_is_kept_exactly_and_a_seed_repeats_it() -> None:
    times = arrival_times(load(request_rate=5.0), 200, seed=1)
    assert times == sorted(times) and times[-1] == pytest.approx(40)
    assert times == arrival_times(load(request_rate=5.0), 200, seed=1) != arrival_times(load(request_rate=5.0), 200, 2)


def test_burstiness_is_the_inverse_of_the_variance() -> None:
    def variation(burstiness: float) -> float:
        times = arrival_times(load(request_rate=1.0, burstiness=burstiness), 4000, seed=3)
        pauses = [after - before for before, after in pairwise(times)]
        mean = sum(pauses) / len(pauses)
        return sum((pause - mean) ** 2 for pause in pauses) / len(pauses) / mean**2

    assert variation(1.0) == pytest.approx(1, abs=0.15)
    assert variation(4.0) == pytest.approx(0.25, abs=0.05)
    assert arrival_times(load(request_rate=2.0, burstiness=math.inf), 3, seed=0) == pytest.approx([0.5, 1.0, 1.5])


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10))])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str, middle: float) -> None:
    ramp = {"ramp_up_strategy": strategy, "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 10.0}
    times = arrival_times(load(burstiness=math.inf, **ramp), 3, seed=0)
    assert times == pytest.approx([1, 1 + 1 / middle, 1 + 1 / middle + 0.1])


# ---- what


def requests(tokens: PromptTokens | None = None, load: LoadFlags | None = None, **values: Any) -> list[LoadRequest]:
    return read_requests(DatasetFlags(**values), load or LoadFlags(), tokens or PromptTokens())


def test_random_prompts_share_their_prefix_only() -> None:
    drawn = requests(num_prompts=50, random_input_len=20, random_output_len=6, random_prefix_len=4)
    assert {len(each.numbers or ()) for each in drawn} == {24} and {each.num_output for each in drawn} == {6}
    assert len({tuple((each.numbers or ())[:4]) for each in drawn}) == 1
    assert len({(each.numbers or ())[4] for each in drawn}) == 50
    varied = requests(num_prompts=200, random_input_len=20, output_len=10, random_range_ratio=0.5)
    assert {len(each.numbers or ()) for each in varied} == set(range(10, 31))
    assert {each.num_output for each in varied} == set(range(5, 16))


def test_every_prefix_is_repeated_as_often() -> None:
    lengths = {"prefix_repetition_prefix_len": 8, "prefix_repetition_suffix_len": 3}
    drawn = requests(
        dataset_name="shared-prefix", num_prompts=12, prefix_repetition_num_prefixes=4, output_len=2, **lengths
    )
    prefixes = [tuple((each.numbers or ())[:8]) for each in drawn]
    assert sorted(map(prefixes.count, set(prefixes))) == [3, 3, 3, 3] and len(drawn[0].numbers or ()) == 11
    with pytest.raises(UsageError, match="3 prompts cannot begin with 10 prefixes"):
        requests(dataset_name="prefix_repetition", num_prompts=3)


def test_a_simulated_load_is_the_workload_of_quire_simulate() -> None:
    spec = WorkloadSpec(
        rate=3.0, num_requests=9, prompt=30, output=5, spread=0.5, shared_prefix=6, num_prefixes=2, seed=4
    )
    lengths = {"random_input_len": 30, "random_output_len": 5, "random_range_ratio": 0.5, "random_prefix_len": 6}
    drawn = requests(
        load=load(request_rate=3.0),
        dataset_name="simulated",
        num_prompts=9,
        simulated_num_prefixes=2,
        seed=4,
        **lengths,
    )
    arrivals = generate(spec)
    assert [each.numbers for each in drawn] == [list(arrival.prompt_ids) for arrival in arrivals]
    assert [each.time for each in drawn] == [arrival.time - arrivals[0].time for arrival in arrivals]


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": time, "input_length": 3, "output_length": 2} for time in (5.0, 5.5, 9.0)]
    path.write_text("\n".join(map(json.dumps, lines)))
    drawn = requests(dataset_name="trace", dataset_path=str(path), num_prompts=2)
    assert [each.time for each in drawn] == [0, 0.5] and [len(each.numbers or ()) for each in drawn] == [3, 3]


def test_a_file_of_prompts_is_shuffled_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "output_tokens": 7}\n{"prompt_token_ids": [1, 2]}\n')
    values = {"dataset_name": "custom", "dataset_path": str(path)}
    drawn = requests(num_prompts=4, disable_shuffle=True, **values)
    assert [(each.text, each.ids, each.num_output) for each in drawn] == [
        ("a", None, 256),
        ("b", None, 7),
        (None, [1, 2], 256),
        ("a", None, 256),
    ]
    assert len(requests(num_prompts=4, no_oversample=True, **values)) == 3
    assert {each.text for each in requests(num_prompts=3, **values)} == {"a", "b", None}
    with pytest.raises(UsageError, match="line 1: output_len is 0"):
        requests(custom_output_len=-1, **values)
    with pytest.raises(UsageError, match="the server takes text"):
        drawn[2].prompt(PromptTokens(), takes_ids=False)


def sharegpt(path: Path, *pairs: tuple[str, str]) -> Path:
    turns = [[{"from": "human", "value": question}, {"from": "gpt", "value": answer}] for question, answer in pairs]
    path.write_text(json.dumps([{"id": str(index), "conversations": turn} for index, turn in enumerate(turns)]))
    return path


def test_conversations_of_a_suitable_length_are_taken(default_model: Path, tmp_path: Path) -> None:
    good = ("Why is the sky so blue?", "Because the air scatters blue light most")
    path = sharegpt(tmp_path / "chats.json", ("Hi", "It is too short"), good, ("again " * 1025, "It is too long"))
    values = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 5, "no_oversample": True}
    tokens = PromptTokens(Tokenizer.load(default_model))
    assert [(each.text, each.num_output) for each in requests(tokens, **values)] == [(good[0], tokens.count(good[1]))]
    assert [each.num_output for each in requests(tokens, sharegpt_output_len=9, **values)] == [9]
    with pytest.raises(UsageError, match="counted in tokens"):
        requests(**values)
    assert len(requests(sharegpt_output_len=9, **values)) == 3  # without a tokenizer none is known to be too long


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "is not ShareGPT's JSON"),
        ('[{"conversations": 3}]', r"Expected `array`, got `int` - at `\$\[0\].conversations`"),
        ('[{"conversations": [{"value": "a"}]}]', "no conversation of a suitable length"),
    ],
)
def test_a_malformed_sharegpt_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=complaint):
        requests(dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=3)


def test_made_up_prompts_have_the_tokens_they_should(default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    tokens = PromptTokens(tokenizer)
    numbers = list(range(1 << 33, (1 << 33) + 300))
    assert len(tokenizer.encode(tokens.text(numbers), add_special_tokens=False)) == 300
    ids = tokens.ids(numbers)
    assert len(set(ids)) > 290 and not set(ids) & set(tokenizer.special_ids) and max(ids) < tokenizer.vocab_size
    assert tokens.text(numbers[:50]) == tokens.text(numbers)[: len(tokens.text(numbers[:50]))]
    assert PromptTokens().text(numbers).count(" ") == 300

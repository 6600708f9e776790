"""Benchmarks of a tiny model: what they count is exact, whatever the clock says."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main as cli
from quire.cli.bench.engine import BenchRun, Phase, Timing
from quire.cli.bench.prompts import random_prompts
from quire.cli.bench.report import spread, spreads
from quire.engine.engine import Engine
from quire.planning.percentiles import percentile


@pytest.fixture
def bench(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """-> the figures of a benchmark, as it prints them."""

    def run(command: str, *flags: str, status: int = 0) -> dict[str, Any]:
        argv = ["bench", command, "-m", str(tiny_model), "--device", "cpu", "--output-json", "-", *flags]
        assert cli.main(argv) == status
        return dict(json.loads(capsys.readouterr().out))

    return run


def test_throughput_counts_what_was_asked_for(bench: Any) -> None:
    figures = bench("throughput", "--num-prompts", "5", "--input-len", "20", "--output-len", "7")
    assert (figures["num_requests"], figures["num_finished"]) == (5, 5)
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["total_num_tokens"]) == (
        100,
        35,
        135,
    )
    assert figures["prefill"]["tokens"] == 100 and figures["prefill"]["steps"] == 1
    assert figures["decode"]["tokens"] == 30 and figures["decode"]["steps"] == 6
    spent = figures["prefill"]["seconds"] + figures["decode"]["seconds"]
    assert figures["elapsed_time"] == pytest.approx(spent)
    assert figures["output_tokens_per_second"] == pytest.approx(35 / figures["elapsed_time"])
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"] <= figures[name]["max"]
    assert figures["ttft_ms"]["max"] < figures["e2el_ms"]["max"]
    assert figures["peak_rss_bytes"] > figures["weight_bytes"]
    unread = {key for key in figures if key.endswith(("_joules", "_bytes")) and figures[key] is None}
    assert unread == figures["not_measured"].keys() >= {"peak_gpu_allocated_bytes"}  # it runs on the CPU
    assert figures["machine"]["cpu"] and figures["options"]["enable_prefix_caching"] is False
    assert not figures["interrupted"]


def test_prompts_in_chunks_beside_others_are_still_prompts(bench: Any) -> None:
    flags = ("--num-prompts", "6", "--input-len", "33", "--output-len", "5", "--max-num-seqs", "4")
    figures = bench("throughput", *flags, "--max-num-batched-tokens", "16", "--num-warmups", "0")
    assert figures["prefill"]["tokens"] == 6 * 33
    assert figures["decode"]["tokens"] < 6 * 4  # the others were drawn in steps with prompts in them


def test_latency_takes_one_batch_after_the_other(bench: Any) -> None:
    flags = ("--batch-size", "3", "--input-len", "8", "--output-len", "4")
    figures = bench("latency", *flags, "--num-iters", "5", "--num-iters-warmup", "2")
    assert len(figures["latencies"]) == 5
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 5)
    assert figures["percentiles"]["99"] == max(figures["latencies"])
    assert (figures["prefill"]["tokens"], figures["decode"]["tokens"]) == (5 * 24, 5 * 9)


def test_random_weights_need_a_config_only(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    flags = ["--load-format", "dummy", "--batch-size", "1", "--num-iters", "2", "--num-iters-warmup", "0"]
    kept = tmp_path / "result.json"
    flags += ["--device", "cpu", "--output-len", "3", "--output-json", str(kept)]
    assert cli.main(["bench", "latency", "-m", str(tmp_path), *flags]) == 0
    told = capsys.readouterr().out
    assert all(
        word in told
        for word in (
            "latency ",
            "machine ",
            "memory      peak RSS ",
            "energy ",
            "prefill ",
            "decode ",
            "p99",
            "first token",
            "tok/s",
        )
    )
    assert json.loads(kept.read_text())["output_len"] == 3


def test_prompts_of_a_file(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "A quire is"},
        {"prompt_token_ids": [5, 6, 7], "output_len": 2},
        {"prompt": "never asked for"},
    ]
    path.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    figures = bench("throughput", "--dataset-path", str(path), "--num-prompts", "2", "--output-len", "4")
    assert figures["num_requests"] == 2
    assert figures["total_input_tokens"] == len("A quire is") + 3  # a byte is a token of the tiny model
    assert figures["total_output_tokens"] == 4 + 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\nnonsense', "line 2"),
        ('{"text": "a"}', "line 1 has no prompt, or two"),
        ('{"prompt": "a", "output_len": 0}', "output_len is 0"),
        ('{"prompt_token_ids": []}', "the prompt is empty"),
        ('{"prompt_token_ids": [1, "x"]}', "no token id"),
        ('{"prompt": ["a"]}', "it is a text"),
        ("\n", "holds no prompt"),
    ],
)
def test_mistakes_in_a_file_are_named(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    argv = ["bench", "throughput", "-m", str(tiny_model), "--device", "cpu", "--dataset-path", str(path)]
    assert cli.main(argv) == cli.USAGE_ERROR
    assert complaint in capsys.readouterr().err


def test_other_mistakes(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*argv: str) -> str:
        assert cli.main(["bench", *argv]) == cli.USAGE_ERROR
        return capsys.readouterr().err

    assert "did you mean `throughput`" in error("througput")
    assert "--num-prompts is 0" in error("throughput", "--num-prompts", "0")
    assert "there is no folder" in error("latency", "--output-json", "/nowhere/x.json")
    assert "cannot be read" in error(
        "throughput", "-m", str(tiny_model), "--device", "cpu", "--dataset-path", "/nowhere"
    )
    assert "context holds 512" in error("latency", "-m", str(tiny_model), "--device", "cpu", "--input-len", "500")


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ctrl-C in that step."""

    def install(number: int) -> None:
        step, count = Engine.step, 0

        def stepped(engine: Engine) -> Any:
            nonlocal count
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGINT)
            return step(engine)

        monkeypatch.setattr(Engine, "step", stepped)

    return install


def test_an_interrupted_throughput_tells_what_it_has(bench: Any, interrupting: Any) -> None:
    interrupting(4)
    flags = ("--num-prompts", "3", "--input-len", "8", "--output-len", "30", "--num-warmups", "0")
    figures = bench("throughput", *flags, status=cli.INTERRUPTED)
    assert figures["interrupted"] and figures["num_finished"] == 0
    assert figures["total_output_tokens"] == 3 * 4 and figures["output_tokens_per_second"] > 0
    assert figures["e2el_ms"] is None and figures["tpot_ms"]["p50"] > 0


def test_an_interrupted_latency_tells_the_batches_that_are_done(
    bench: Any, interrupting: Any, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(4 * 2 + 2)
    flags = ("--batch-size", "2", "--output-len", "4", "--num-iters", "9", "--num-iters-warmup", "0")
    figures = bench("latency", *flags, status=cli.INTERRUPTED)
    assert figures["interrupted"] and len(figures["latencies"]) == 2
    interrupting(1)
    assert cli.main(["bench", "latency", "-m", str(tiny_model), "--device", "cpu"]) == cli.INTERRUPTED
    assert "interrupted before the first measured batch" in capsys.readouterr().out


def test_the_default_model(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--num-prompts", "2", "--input-len", "16", "--output-len", "3", "--json"]
    assert cli.main(["bench", "throughput", *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["model"], figures["total_output_tokens"]) == ("smollm2", 6)
    assert figures["weight_bytes"] > 5e7


def test_percentiles_are_values_that_were_measured() -> None:
    values = [0.005, 0.001, 0.004, 0.002, 0.003]
    assert [percentile(values, share) for share in (1, 20, 50, 90, 99, 100)] == [
        0.001,
        0.001,
        0.003,
        0.005,
        0.005,
        0.005,
    ]
    assert spread([]) is None
    assert spread(values) == pytest.approx({"mean": 3, "p50": 3, "p90": 5, "p99": 5, "max": 5})


def test_a_request_without_a_second_token_has_no_time_between_tokens() -> None:
    timing = Timing(num_prompt=4, asked=1.0, first=1.5, last=1.5, num_output=1, finished=True)
    figures = spreads([BenchRun([timing, Timing(num_prompt=4, asked=1.0)])])
    assert figures["ttft_ms"]["mean"] == 500 and figures["tpot_ms"] is None and figures["e2el_ms"]["mean"] == 500
    assert Phase().rate == 0.0


def test_prompts_are_the_same_everywhere_and_differ() -> None:
    first, again, other = (random_prompts(3, 8, 2, 1000, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(one.prompt_ids) for one in first}) == 3 and {one.output_len for one in first} == {2}

"""`quire bench serve` against a real server, and against one that misbehaves."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients.served import served
from quire.cli import main as cli
from quire.cli.bench.serve.server_memory import server_pids
from streaming_server import (
    Respond,
    begin,
    break_off,
    fail_midway,
    listening,
    refuse,
    send,
    serving,
    stream_all,
    text,
    usage,
)

Bench = Callable[..., dict[str, Any]]

# What scripts that plot vLLM's files read.
VLLM_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration
completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms
p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms
mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
"""
DETAILS = "input_lens output_lens ttfts itls start_times queue_times latencies generated_texts errors"


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """-> the figures of a load, as they are printed."""

    def run(url: str, *flags: str, status: int = 0) -> dict[str, Any]:
        assert cli.main(["bench", "serve", "--base-url", url, "--json", *flags]) == status
        return dict(json.loads(capsys.readouterr().out))

    return run


@pytest.fixture(scope="module")
def server(default_model: Path) -> str:
    return served()


def lengths(num_prompts: int, num_input: int, num_output: int) -> list[str]:
    flags = ["--num-prompts", str(num_prompts), "--random-input-len", str(num_input)]
    return [*flags, "--random-output-len", str(num_output)]


# ---- against Quire


def test_users_that_wait_for_their_answers(server: str, bench: Bench, tmp_path: Path) -> None:
    flags = [
        "--max-concurrency",
        "2",
        "--num-warmups",
        "1",
        "--save-result",
        "--save-detailed",
        "--metadata",
        "gpu=none",
    ]
    figures = bench(server, *lengths(5, 12, 4), *flags, "--result-dir", str(tmp_path), "--goodput", "ttft:60000")
    assert (figures["completed"], figures["failed"], figures["failures"]) == (5, 0, {})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (60, 20)
    assert figures["max_concurrent_requests"] == 2 and figures["gpu"] == "none"
    assert figures["request_goodput"] == figures["request_throughput"] == pytest.approx(5 / figures["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < figures[f"p50_{metric}_ms"] <= figures[f"p90_{metric}_ms"] <= figures[f"p99_{metric}_ms"]
    assert figures["mean_ttft_ms"] + 3 * figures["mean_tpot_ms"] == pytest.approx(figures["mean_e2el_ms"])
    [saved] = tmp_path.glob("openai-infqps-concurrency2-smollm2-*.json")
    assert json.loads(saved.read_text()) == figures
    assert figures.keys() >= {*VLLM_KEYS.split(), *DETAILS.split()}
    assert figures["output_lens"] == [4] * 5
    assert all(1 <= len(gaps) <= 3 for gaps in figures["itls"])  # a token may be a part of a character only


def test_the_memory_of_a_server_on_this_machine(server: str, bench: Bench) -> None:
    pids = server_pids(int(server.rpartition(":")[2]))
    assert len(pids) == 2  # the server process and the engine process
    assert bench(server, *lengths(1, 4, 1))["peak_rss_bytes"] > 100e6


@pytest.mark.parametrize("burstiness", ["1", "inf"])
def test_poisson_and_even_arrivals(server: str, bench: Bench, burstiness: str) -> None:
    figures = bench(server, *lengths(8, 6, 2), "--request-rate", "20", "--save-detailed", "--burstiness", burstiness)
    assert figures["request_rate"] == 20 and figures["burstiness"] == (1 if burstiness == "1" else "inf")
    starts = figures["start_times"]
    assert starts == sorted(starts) and figures["duration"] > starts[-1] > 8 / 20 - 0.01


def test_a_chat_is_asked_in_text(server: str, bench: Bench) -> None:
    figures = bench(server, *lengths(2, 10, 3), "--backend", "openai-chat", "--temperature", "0.5", "--seed", "7")
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 6)
    assert "tokens each beside those asked for" in figures["notes"][0]  # the chat template
    assert figures["total_input_tokens"] > 20


def test_datasets(server: str, bench: Bench, tmp_path: Path) -> None:
    trace, chats, prompts = tmp_path / "trace.jsonl", tmp_path / "chats.json", tmp_path / "prompts.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 9, "output_length": 2}\n' * 2)
    turns = [{"from": "human", "value": "Why is the sky blue?"}, {"from": "gpt", "value": "Because of the air in it."}]
    chats.write_text(json.dumps([{"conversations": turns}]))
    prompts.write_text('{"prompt": "A quire is", "output_tokens": 2}\n')
    few = ["--num-prompts", "2", "--ignore-eos"]
    repeated = ["--dataset-name", "shared-prefix", "--prefix-repetition-num-prefixes", "1", "--output-len", "2"]
    figures = bench(
        server, *few, *repeated, "--prefix-repetition-prefix-len", "5", "--prefix-repetition-suffix-len", "4"
    )
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (18, 4)
    figures = bench(server, *few, "--dataset-name", "trace", "--dataset-path", str(trace))
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (18, 4)
    figures = bench(server, *few, "--dataset-name", "sharegpt", "--dataset-path", str(chats), "--model", "smollm2")
    assert figures["completed"] == 2 and figures["total_output_tokens"] == 2 * 7
    figures = bench(server, *few, "--dataset-name", "custom", "--dataset-path", str(prompts))
    assert figures["total_output_tokens"] == 4
    figures = bench(server, *lengths(3, 5, 2), "--dataset-name", "simulated", "--simulated-burst", "3")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (15, 6)


def test_the_table(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "serve", "--base-url", f"{server}/v1", *lengths(2, 4, 2), "--percentile-metrics", "ttft,e2el"]
    assert cli.main([*argv, "--trust-remote-code", "--goodput", "ttft:0.001", "--metric-percentiles", "99.9"]) == 0
    out, err = capsys.readouterr()
    assert "warning: --trust-remote-code has no effect" in err
    rows = dict(line.split(":", 1) for line in out.splitlines() if ":" in line)
    assert rows["Successful requests"].strip() == "2" and rows["Total generated tokens"].strip() == "4"
    assert float(rows["Request goodput (req/s)"]) == 0 and float(rows["P99.9 TTFT (ms)"]) > 0
    assert "Mean E2EL (ms)" in rows and "Mean TPOT (ms)" not in rows
    assert float(rows["Peak memory of the server (GiB)"]) > 0.1 and "Energy of the CPU (J)" in rows


def test_a_server_that_refuses_the_first_request(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*flags: str) -> str:
        assert cli.main(["bench", "serve", "--base-url", server, *flags]) == cli.USAGE_ERROR
        return capsys.readouterr().err

    assert "status 404: no model `smollm3` (did you mean `smollm2`?)" in error("--model", "smollm3")
    assert "status 400" in error(*lengths(2, 9000, 2))
    assert "the server refuses the first request: status 4" in error("--extra-body", '{"temperature": -3}')


# ---- against a server that misbehaves


def after_the_first(respond: Respond) -> Respond:
    """The question whether ids are taken is answered well, and the next ones by `respond`."""
    count = 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await (stream_all if count == 1 else respond)(body, writer)

    return answer


async def no_events(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, b"data: [1, 2]\n\n")
    send(writer, b"")


async def no_json(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, b'data: {"choices": [\n\n')
    send(writer, b"")


async def odd_choices(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, b'data: {"choices": ["text"]}\n\n')
    send(writer, b"")


async def no_end(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, text("a"))
    send(writer, b"")


async def no_http(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\r\n\r\n")


async def hang_up(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.close()


async def busy(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer, "429 Too Many Requests", chunked=False)
    writer.write(b'{"error": {"message": "come back later"}}')


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (break_off, "the server broke off in the middle of its answer"),
        (fail_midway, "the stream ended in an error: out of memory"),
        (no_events, "an event that is not a JSON object"),
        (no_json, "an event that is not JSON"),
        (odd_choices, "an event of another shape than OpenAI's"),
        (no_end, "without a finish_reason and without [DONE]"),
        (no_http, "the answer is not HTTP"),
        (hang_up, "the server closed the connection without an answer"),
        (busy, "status 429: come back later"),
    ],
)
def test_broken_answers_are_counted_by_their_reason(bench: Bench, respond: Respond, reason: str) -> None:
    with serving(after_the_first(respond)) as url:
        figures = bench(url, "--model", "x", *lengths(3, 4, 2), status=1)
    [(told, count)] = figures["failures"].items()
    assert reason in told and count == figures["failed"] == 3 and figures["completed"] == 0


def test_some_failures_leave_the_others(bench: Bench) -> None:
    count = 0

    async def every_other(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await (refuse if count % 2 else stream_all)(body, writer)

    with serving(after_the_first(after_the_first(every_other))) as url:
        figures = bench(url, "--model", "x", *lengths(5, 4, 2), "--max-concurrency", "1", "--save-detailed")
    assert (figures["completed"], figures["failures"]) == (3, {"status 400: too long": 2})
    assert [bool(error) for error in figures["errors"]] == [False, True, False, True, False]
    assert figures["total_output_tokens"] == 6


def test_a_refusal_of_the_first_request_stops_all(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(after_the_first(refuse)) as url:
        argv = ["bench", "serve", "--base-url", url, "--model", "x", *lengths(50, 4, 2), "--max-concurrency", "1"]
        assert cli.main(argv) == cli.USAGE_ERROR
    assert "the server refuses the first request: status 400: too long" in capsys.readouterr().err


def test_a_server_that_takes_no_ids_is_asked_in_text(bench: Bench) -> None:
    async def text_only(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await (stream_all if isinstance(body["prompt"], str) else refuse)(body, writer)

    with serving(text_only) as url:
        figures = bench(url, "--model", "x", *lengths(2, 4, 2))
    assert figures["completed"] == 2 and figures["total_input_tokens"] > 8  # this server counts characters


def test_a_server_without_usage(bench: Bench, default_model: Path) -> None:
    async def without_usage(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begin(writer)
        send(writer, text("The sky") + text(" is blue"))
        send(writer, b"data: [DONE]\n\n")
        send(writer, b"")

    with serving(without_usage) as url:
        chunks = bench(url, "--model", "x", *lengths(2, 4, 2))
        tokens = bench(url, "--model", "x", *lengths(2, 4, 2), "--tokenizer", "smollm2")
    assert chunks["total_output_tokens"] == 4 and "counted as chunks" in chunks["notes"][0]
    assert tokens["total_output_tokens"] == 8 and "counted as the tokens" in tokens["notes"][0]
    assert "0.50 chunks a token" in tokens["notes"][1] and tokens["total_input_tokens"] == 8


def test_connections_are_kept_alive_and_a_closed_one_is_made_again(bench: Bench) -> None:
    writers: list[asyncio.StreamWriter] = []
    count = 0

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        writers.append(writer)
        await stream_all(body, writer)
        if count == 5:
            writer.close()  # after an answer that did not say so

    with serving(respond, keep_alive=True) as url:
        figures = bench(url, "--model", "x", *lengths(9, 4, 2), "--max-concurrency", "1")
    assert (figures["completed"], figures["failed"]) == (9, 0)
    assert len(writers) == 10 and len(set(writers)) == 2


def test_runs_are_added_to_one_file(bench: Bench, tmp_path: Path) -> None:
    """As vLLM's --append-result writes them: a line each."""
    kept = tmp_path / "runs.jsonl"
    flags = ["--model", "x", "--append-result", "--result-dir", str(tmp_path), "--result-filename", kept.name]
    with serving(stream_all) as url:
        runs = [bench(url, *lengths(count, 4, 2), *flags) for count in (1, 2)]
    saved = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [run["completed"] for run in saved] == [1, 2]
    assert all(run.keys() <= line.keys() for run, line in zip(runs, saved, strict=True))


def test_requests_have_ids_that_are_found_in_the_log_of_a_server(bench: Bench) -> None:
    heads: list[str] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        length = int(heads[-1].split("content-length:")[1].split("\r\n")[0])
        if length:
            await stream_all(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    with listening(on_connection) as url:
        bench(url, "--model", "x", *lengths(3, 4, 2), "--request-id-prefix", "night-", "--max-concurrency", "1")
    asked = [head for head in heads if "post " in head]
    assert ["x-request-id" in head for head in asked] == [False, True, True, True], "the first one is a probe"
    assert all(f"x-request-id: night-{index}\r\n" in head for index, head in enumerate(asked[1:]))


@pytest.mark.parametrize("assignment", ["random", "round-robin"])
def test_each_request_asks_for_an_adapter(bench: Bench, assignment: str) -> None:
    asked: list[str] = []

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(body["model"])
        await stream_all(body, writer)

    adapters = ["--lora-modules", "sql", "poems", "--lora-assignment", assignment, "--max-concurrency", "1"]
    with serving(respond) as url:
        bench(url, "--model", "x", *lengths(20, 4, 2), *adapters)
    assert asked[0] == "x" and set(asked[1:]) == {"sql", "poems"}
    assert (asked[1:] == ["sql", "poems"] * 10) == (assignment == "round-robin")


def test_csv_files_are_replayed_or_give_their_lengths(bench: Bench, tmp_path: Path) -> None:
    azure, burst = tmp_path / "azure.csv", tmp_path / "burstgpt.csv"
    times = ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.9805900")
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{at},7,3\n" for at in times))
    rows = ["5,ChatGPT,40,9,49,Conversation log", "9,GPT-4,5,2,7,API log", "9,GPT-4,5,0,5,API log"]
    burst.write_text("\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows]))
    with serving(stream_all) as url:
        flags = ["--model", "x", "--save-detailed", "--dataset-name"]
        replayed = bench(url, *flags, "timed_trace", "--dataset-path", str(azure))
        drawn = bench(url, *flags, "burstgpt", "--dataset-path", str(burst), "--num-prompts", "4")
    assert (replayed["input_lens"], replayed["output_lens"]) == ([7, 7], [3, 3])
    assert replayed["start_times"][1] - replayed["start_times"][0] == pytest.approx(0.3, abs=0.1)
    assert (drawn["input_lens"], drawn["output_lens"]) == ([5] * 4, [2] * 4), "GPT-4's, that have an answer"


def test_ctrl_c_tells_what_is_done(bench: Bench) -> None:
    count = 0

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count < 4:
            await stream_all(body, writer)
            return
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    before = signal.getsignal(signal.SIGINT)
    with serving(respond) as url:
        figures = bench(url, "--model", "x", *lengths(9, 4, 2), "--max-concurrency", "2", status=cli.INTERRUPTED)
    assert signal.getsignal(signal.SIGINT) is before
    assert figures["interrupted"] and (figures["completed"], figures["failed"]) == (2, 0)
    assert figures["total_output_tokens"] == 4 and figures["p99_ttft_ms"] > 0


def test_a_server_that_is_starting_is_waited_for(bench: Bench) -> None:
    count = 0

    async def loading(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count > 2:
            await stream_all(body, writer)
            return
        begin(writer, "503 Service Unavailable", chunked=False)
        writer.write(b'{"detail": "loading"}')

    flags = ["--model", "x", *lengths(1, 4, 2)]
    with serving(loading) as url:
        assert cli.main(["bench", "serve", "--base-url", url, *flags]) == cli.USAGE_ERROR
        assert bench(url, *flags, "--ready-check-timeout-sec", "20")["completed"] == 1


def test_keys_and_headers_are_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[str] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        begin(writer)
        send(writer, text("a") + usage(4, 1))
        send(writer, b"")
        writer.close()

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with listening(on_connection) as url:
        bench(url, "--model", "x", *lengths(1, 4, 1), "--header", "x-team=red", "x-user=me")
        bench(url, "--model", "x", *lengths(1, 4, 1), "--api-key", "other")
    assert "authorization: bearer secret\r\nx-team: red\r\nx-user: me\r\n" in heads[0].lower()
    assert "Authorization: Bearer other\r\n" in heads[-1]


def test_metrics_tell_the_memory_of_a_server_elsewhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.bench.serve.server_memory.server_pids", lambda port: set())
    served = "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 2.5e+09\n"

    async def with_metrics(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body:
            await stream_all(body, writer)
            return
        begin(writer)
        send(writer, served.encode())
        send(writer, b"")

    flags = ["--model", "x", *lengths(3, 4, 2), "--max-concurrency", "1"]
    with serving(with_metrics) as url:
        assert bench(url, *flags)["peak_rss_bytes"] == 2_500_000_000
        served = "# nothing"
        figures = bench(url, *flags)
    assert figures["peak_rss_bytes"] is None
    assert "its /metrics do not tell" in figures["not_measured"]["peak_rss_bytes"]


def test_a_server_with_a_certificate_of_its_own(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with serving(stream_all, keep_alive=True, ssl=context) as url:
        flags = ["--model", "x", *lengths(3, 4, 2), "--max-concurrency", "2"]
        assert bench(url, *flags, "--insecure")["completed"] == 3
        assert cli.main(["bench", "serve", "--base-url", url, *flags]) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert "certificate verify failed" in error and "--insecure" in error

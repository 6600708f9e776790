"""Batch files: with a service whose answers are known, and the command itself with a tiny model."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main as cli
from quire.client.one_model import OneModel
from quire.server.batch.requests import BadBatch, BatchRequests
from quire.server.batch.results import BatchResults
from quire.server.batch.run import run_batch
from server.fake_service import FakeService, answer

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "Hello"}}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    results = [json.loads(each) for each in path.read_bytes().split(b"\n") if each]
    by_id = {result["custom_id"]: result for result in results}
    assert len(by_id) == len(results), "a line was answered twice"
    return by_id


def run(source: Path, target: Path, service: FakeService | None = None) -> dict[str, dict[str, Any]]:
    requests = BatchRequests(source)
    with BatchResults(target) as results:
        todo = (each for each in requests if each.key not in results.done)
        asyncio.run(run_batch(OneModel(service or FakeService()), todo, 4, results.add))
    return read(target)


def test_lines_are_answered_as_over_http(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("a"),
        line("b", CHAT, messages=[{"role": "user", "content": "Hi"}], model="fake"),
        line("c", max_tokens=3, prompt=["x", "y"]),
        line("d", "/v1/responses", input="Hi"),
        line("e", "/v1/embeddings", input="ab", dimensions=2),
        line("f", "/v1/score", text_1="ab", text_2=["a", "abc"]),
        line("g", "/v1/rerank", query="ab", documents=["a", "ab"]),
    )
    results = run(source, tmp_path / "out.jsonl")
    assert {result["response"]["status_code"] for result in results.values()} == {200}
    assert results["a"]["response"]["body"]["choices"][0]["text"] == answer(0, 6)[:16]
    assert results["b"]["response"]["body"]["object"] == "chat.completion"
    assert len(results["c"]["response"]["body"]["choices"]) == 2
    assert results["d"]["response"]["body"]["output"][0]["content"][0]["text"].startswith("Sample 0 read")
    assert results["e"]["response"]["body"]["data"][0]["embedding"] == [3.0, 1.0]
    assert [each["score"] for each in results["f"]["response"]["body"]["data"]] == [1.0, 2.0]
    assert [each["index"] for each in results["g"]["response"]["body"]["results"]] == [1, 0]
    assert all(result["error"] is None and result["id"].startswith("batch_req_") for result in results.values())


def test_what_is_wrong_with_a_line_is_told_in_its_result(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("field", prompt="x", top_p=7),
        line("model", prompt="x", model="nobody"),
        line("stream", prompt="x", stream=True),
        line("before", "/v1/responses", input="x", previous_response_id="resp_1"),
        line("background", "/v1/responses", input="x", background=True),
        line("engine", prompt="!fail"),
        line("bug", prompt="!crash"),
        line("url", "/v1/nothing"),
        {**line("method"), "method": "GET"},
        line("fine"),
    )
    results = run(source, tmp_path / "out.jsonl")
    told = {name: result["response"] and result["response"]["status_code"] for name, result in results.items()}
    assert told == {
        "field": 400,
        "model": 404,
        "stream": 400,
        "before": 400,
        "background": 400,
        "engine": 500,
        "bug": 500,
        "url": None,
        "method": None,
        "fine": 200,
    }
    assert results["field"]["response"]["body"]["error"]["param"] == "top_p"
    assert "secret" not in json.dumps(results["bug"])
    assert results["url"]["error"]["code"] == "invalid_url" and results["method"]["error"]["code"] == "invalid_method"


def test_what_is_done_is_not_done_again_and_a_torn_line_is(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{n}") for n in range(10)))
    target = tmp_path / "out.jsonl"
    whole = run(source, target)
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:6]) + lines[6][:40])
    service = FakeService()
    again = run(source, target, service)
    assert len(service.seen) == 4, "six were there, and one of them in part"
    assert again.keys() == whole.keys()


def test_lines_with_the_same_id_are_all_answered_and_resumed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line("same", prompt="x" * n) for n in (1, 2, 3)), line("other"))
    target = tmp_path / "out.jsonl"

    def asked(service: FakeService) -> list[int]:
        requests = BatchRequests(source)
        with BatchResults(target) as results:
            todo = (each for each in requests if each.key not in results.done)
            asyncio.run(run_batch(OneModel(service), todo, 1, results.add))
        return [len(request.prompt) for request in service.seen]

    assert asked(FakeService()) == [1, 2, 3, 5]
    lines = target.read_bytes().splitlines(keepends=True)
    assert [json.loads(each)["custom_id"] for each in lines] == ["same"] * 3 + ["other"]
    target.write_bytes(lines[2] + lines[0])
    assert asked(FakeService()) == [2, 5], "the second and the last are left"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"custom_id": "a"', "not JSON"),
        ('{"custom_id": "a", "url": "/", "body": ' + "[" * 9000 + "]" * 9000 + "}", "nested too deeply"),
        ('{"custom_id": "a", "body": {}}', "url"),
        ('{"url": "/v1/completions", "body": {}}', "custom_id"),
        ("[1]", "line 2"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("first")) + "\n" + text + "\n")
    with pytest.raises(BadBatch, match=r"line 2: .*" if said != "line 2" else said) as caught:
        BatchRequests(source)
    assert said in caught.value.message


def test_a_file_that_holds_something_else_is_not_appended_to(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("my diary\n")
    with pytest.raises(BadBatch, match="no result"), BatchResults(target):
        pass
    assert target.read_text() == "my diary\n"
    source = write(tmp_path / "in.jsonl", line("a"))
    write(target, {"custom_id": "of another batch"})
    assert cli.main(["run-batch", str(source), str(target)]) == 2
    assert cli.main(["run-batch", str(source), str(source)]) == 2
    assert cli.main(["run-batch", str(source)]) == 2
    assert cli.main(["run-batch", "-i", str(source), "-o", str(target), str(target)]) == 2
    with BatchResults(tmp_path / "held"), pytest.raises(BadBatch, match="another run"), BatchResults(tmp_path / "held"):
        pass


def test_the_command_goes_on_after_being_killed_and_interrupted(tiny_model: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl", *(line(f"r{n}", prompt=f"{n}", max_tokens=32, ignore_eos=True) for n in range(150))
    )
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quire.cli.main", "run-batch", "-i", source, "-o", target, "--model", tiny_model]
    command += ["--max-num-seqs", "4", "--kv-cache-memory-bytes", "16MiB"]

    def some_results(more_than: int) -> None:
        end = time.monotonic() + 60
        while not target.exists() or target.read_bytes().count(b"\n") <= more_than:
            assert time.monotonic() < end
            time.sleep(0.01)

    for how, status, least in ((signal.SIGKILL, -signal.SIGKILL, 5), (signal.SIGINT, 130, 20)):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            some_results(least)
            process.send_signal(how)
            _, said = process.communicate(timeout=60)
        assert process.returncode == status
        assert how == signal.SIGKILL or "interrupted" in said
    before = read(target)
    assert 20 < len(before) < 150
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and f"{len(before)} from before" in done.stderr
    results = read(target)
    assert len(results) == 150 and all(result["response"]["status_code"] == 200 for result in results.values())
    assert all(results[name] == result for name, result in before.items())


def test_a_full_disk_is_an_error_and_the_batch_goes_on_later(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", *(line(f"r{n}") for n in range(10))), tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))  # a few results
    try:
        with pytest.raises(BadBatch, match="cannot be written: File too large"):
            run(source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.stat().st_size == 1500, "the last line is torn"
    service = FakeService()
    assert len(run(source, target, service)) == 10 and 0 < len(service.seen) < 10

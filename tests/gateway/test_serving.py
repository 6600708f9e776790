"""The gateway in front of real engines: answers are the same, and streams survive the death of a server."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from gateway.gateways import RunningGateway, gateway, wait_for
from serving.test_serving import SECONDS, Server, start

pytestmark = pytest.mark.slow

FLAGS = ("--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8", "--max-model-len", "1024")
PROMPT = [{"role": "user", "content": "Tell a long story about a lighthouse."}]
ASKED = {"model": "smollm2", "messages": PROMPT, "max_tokens": 64, "ignore_eos": True, "stream": True}


def begin(blocks: Path) -> Server:
    """`blocks`: a directory of KV blocks that the servers share."""
    disk = ("--kv-disk-path", str(blocks), "--kv-disk-write-policy", "write_through")
    return start("--served-model-name", "smollm2", *FLAGS, *disk)


def end(server: Server) -> None:
    with suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGTERM)
    server.process.wait(SECONDS)
    server.process.stderr.close()  # type: ignore[union-attr]


class Engines:
    """Three servers behind a gateway. Tests kill two of them."""

    def __init__(self, folder: Path) -> None:
        self.servers = {name: begin(folder / "blocks") for name in "abc"}
        config = "[faults]\nhealth_interval = 0.1\n" + "".join(
            f'[[workers]]\nurl = "{server.url}"\nname = "{name}"\n' for name, server in self.servers.items()
        )
        self.context = gateway(config, folder=folder)
        self.gateway: RunningGateway = self.context.__enter__()

    def disk_hits(self) -> dict[str, float]:
        """Tokens that each server has read from the directory they share."""
        hits = {}
        for name, server in self.servers.items():
            lines = self.gateway.http.get(f"{server.url}/metrics").text.splitlines()
            hits[name] = sum(float(line.split()[-1]) for line in lines if line.startswith("quire_kv_tier_hits_total{"))
        return hits

    def kill_the_busy_one(self) -> str:
        """With its engine, as a machine that goes down."""
        [name] = [name for name, worker in self.gateway.workers().items() if worker["in_flight"]]
        process = psutil.Process(self.servers[name].process.pid)
        for each in (*process.children(recursive=True), process):
            each.kill()
        end(self.servers.pop(name))
        return name


@pytest.fixture(scope="module")
def engines(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.context.__exit__(None, None, None)
    for server in made.servers.values():
        end(server)


def events(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def text_of(chunks: list[dict[str, object]]) -> str:
    return "".join(choice["delta"].get("content") or "" for each in chunks for choice in each["choices"])  # type: ignore


def whole(
    engines: Engines, url: str, headers: dict[str, str] | None = None, **fields: object
) -> list[dict[str, object]]:
    asked = engines.gateway.http.post(f"{url}/v1/chat/completions", json={**ASKED, **fields}, headers=headers)
    lines = asked.text.splitlines()
    assert lines[-2] == "data: [DONE]"
    return list(events(iter(lines)))


def test_answers_are_those_of_the_engine(engines: Engines) -> None:
    direct = whole(engines, engines.servers["a"].url, seed=5, max_tokens=12)
    passed = whole(engines, engines.gateway.url, seed=5, max_tokens=12)
    assert text_of(direct) == text_of(passed) != ""
    assert len({chunk["id"] for chunk in passed}) == len({chunk["created"] for chunk in passed}) == 1
    with openai.OpenAI(base_url=f"{engines.gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="smollm2", messages=PROMPT, max_tokens=12, seed=5)  # type: ignore
        assert answer.usage and answer.usage.completion_tokens == 12


def test_a_stream_of_an_engine_that_hangs_is_hedged(engines: Engines, tmp_path: Path) -> None:
    """The same tokens come from another one, and the request is gone from the first when it goes on."""
    slow, quick = engines.servers["a"], engines.servers["b"]
    config = 'policy = "round_robin"\n[faults]\nhedge_seconds = 0.3\nhealth_interval = 60\n' + "".join(
        f'[[workers]]\nurl = "{server.url}"\nname = "{name}"\n' for name, server in (("b", quick), ("a", slow))
    )
    expected = text_of(whole(engines, quick.url, seed=5, max_tokens=12))
    frozen = psutil.Process(slow.process.pid).children(recursive=True)
    with gateway(config, folder=tmp_path) as running:
        for each in frozen:
            each.suspend()
        try:
            chunks = whole(engines, running.url, seed=5, max_tokens=12)
        finally:
            for each in frozen:
                each.resume()
        assert text_of(chunks) == expected and len({chunk["id"] for chunk in chunks}) == 1
        assert running.metric("hedges_total", 'outcome="won"') == 1
        assert running.workers()["a"]["in_flight"] == 0
    wait_for(lambda: "quire_num_requests_running" in (said := httpx.get(f"{slow.url}/metrics").text) and idle(said))


def idle(metrics: str) -> bool:
    found = re.findall(r"^quire_num_requests_(?:running|waiting)\S* (\S+)$", metrics, re.MULTILINE)
    return all(float(count) == 0 for count in found)


def test_a_stream_survives_the_death_of_its_gateway(engines: Engines, tmp_path: Path) -> None:
    """The client comes back through another gateway, with its request id and the last id that it has seen."""
    asked, named = {**ASKED, "max_tokens": 24}, {"x-request-id": "one-story"}
    expected = text_of(whole(engines, engines.gateway.url, max_tokens=24, headers=named))
    first, workers = "", "".join(f'[[workers]]\nurl = "{server.url}"\n' for server in engines.servers.values())
    with gateway(workers, folder=tmp_path) as other:
        wait_for(lambda: all(worker["state"] == "ready" for worker in other.workers().values()))
        with (
            suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", f"{other.url}/v1/chat/completions", json=asked, headers=named) as answer,
        ):
            for line in answer.iter_lines():
                first += line + "\n"
                if line == "id: 8":
                    other.kill()
    assert "[DONE]" not in first, first
    last_id = re.findall(r"id: (\d+)\n", first)[-1]
    again = whole(engines, engines.gateway.url, max_tokens=24, headers={**named, "last-event-id": last_id})
    begun = list(events(iter(first[: first.index("\n\n", first.index(f"id: {last_id}\n"))].splitlines())))
    assert text_of(begun) + text_of(again) == expected and text_of(begun) and text_of(again)
    assert {chunk["id"] for chunk in begun} == {chunk["id"] for chunk in again}


def test_a_stream_survives_the_death_of_its_server(engines: Engines) -> None:
    """Killed in the middle, it goes on at the other one: the same tokens, one id, one end."""
    expected = whole(engines, engines.gateway.url, seed=7, stream_options={"include_usage": True})
    chunks: list[dict[str, object]] = []
    before = engines.disk_hits()
    asked = {**ASKED, "seed": 7, "stream_options": {"include_usage": True}, "cache_salt": "not read before"}
    with httpx.stream("POST", f"{engines.gateway.url}/v1/chat/completions", json=asked, timeout=SECONDS) as answer:
        for chunk in events(answer.iter_lines()):
            chunks.append(chunk)
            if len(chunks) == 10:
                engines.kill_the_busy_one()
    assert text_of(chunks) == text_of(expected)
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    assert chunks[-1]["usage"]["completion_tokens"] == 64, "all of them are counted"  # type: ignore[index]
    assert [chunk["choices"] for chunk in chunks if chunk["choices"]][-1][0]["finish_reason"] == "length"  # type: ignore
    assert engines.gateway.metric("resumes_total") == 1
    gained = [hits - before[name] for name, hits in engines.disk_hits().items()]
    assert sum(gained) >= 32, "its prompt and its first tokens are computed again"


def test_a_stream_waits_for_a_worker_where_there_is_no_other(engines: Engines) -> None:
    """Also without a seed of its own: the one that it began with holds."""
    kept, lost = engines.servers
    engines.gateway.http.post(f"{engines.gateway.admin}/workers/{kept}/drain")
    chunks = []
    with httpx.stream("POST", f"{engines.gateway.url}/v1/chat/completions", json=ASKED, timeout=SECONDS) as answer:
        for chunk in events(answer.iter_lines()):
            chunks.append(chunk)
            if len(chunks) == 5:
                assert engines.kill_the_busy_one() == lost
                engines.gateway.http.post(f"{engines.gateway.admin}/workers/{kept}/resume")
    assert sum(bool(chunk["choices"]) for chunk in chunks) >= 64
    assert len({chunk["id"] for chunk in chunks}) == 1

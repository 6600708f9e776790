"""`quire serve` as its users have it: the command, the default model, real clients, real trouble."""

import concurrent.futures
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

pytestmark = pytest.mark.slow

SECONDS = 60
HTTP = httpx.Client(timeout=SECONDS, limits=httpx.Limits(max_connections=None))


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    curl: str  # the line it printed for trying it

    @property
    def engine(self) -> psutil.Process:
        [child] = psutil.Process(self.process.pid).children()
        return child

    def metric(self, name: str) -> float:
        text = HTTP.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


def wait_for(met: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def start(*flags: str) -> Server:
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.strip().startswith("curl"):
            break
    address = re.search(r"http://[\d.]+:\d+", "".join(said))
    assert address, "".join(said)
    threading.Thread(target=lambda: [*process.stderr], daemon=True).start()  # type: ignore[misc]
    return Server(process, address[0], said[-1].strip())


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    server = start()
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SECONDS) == 0
    HTTP.close()
    server.process.stderr.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


FRANCE = [{"role": "user", "content": "Write one sentence about the sea."}]


def test_the_line_it_prints_works(server: Server) -> None:
    answer = json.loads(subprocess.run(shlex.split(server.curl), check=True, capture_output=True).stdout)
    assert answer["choices"][0]["message"]["content"]


def test_curl_streams_a_chat(server: Server) -> None:
    body = json.dumps({"model": "smollm2", "stream": True, "max_tokens": 8, "messages": FRANCE})
    command = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).strip()


def test_openai_chat_and_stream_agree(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": FRANCE, "max_tokens": 24, "seed": 4, "n": 2, "temperature": 0.7}
    full = client.chat.completions.create(**asked)
    texts = ["", ""]
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in full.choices] and texts[0] != texts[1]
    assert usage and full.usage and usage.completion_tokens == full.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 16, "the second time, the prompt comes from the cache"


def test_openai_completions_logprobs_and_stop(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 16}
    whole = client.completions.create(**asked, logprobs=3).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    likeliest = [max(top.values()) for top in whole.logprobs.top_logprobs]
    assert likeliest == whole.logprobs.token_logprobs, "greedy takes the likeliest"
    stop = whole.text[4:7]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="typo_field"):
        client.chat.completions.create(model="smollm2", messages=FRANCE, extra_body={"typo_field": 1})
    with pytest.raises(openai.BadRequestError, match=r"9000 tokens and 16 are asked for, and the context holds 8192"):
        client.completions.create(model="smollm2", prompt=[5] * 9000)


def stream_tokens(url: str, number: int, give_up_after: int | None = None) -> list[int] | None:
    """The ids of one streamed completion, or None if it was given up on the way."""
    body = {
        "model": "smollm2",
        "prompt": f"Chapter {number}. It was a day",
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or []
            if give_up_after is not None and len(ids) >= give_up_after:
                return None
    return ids


def test_64_streams_with_cancellations_and_a_killed_engine(server: Server) -> None:
    chance = random.Random(3)
    given_up = {number: chance.randrange(1, 16) for number in range(64) if chance.random() < 0.25}
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        undisturbed = list(pool.map(lambda number: stream_tokens(server.url, number), range(64)))
        assert all(ids is not None and len(ids) == 24 for ids in undisturbed)
        before = server.engine
        results = pool.map(lambda number: stream_tokens(server.url, number, given_up.get(number)), range(64))
        wait_for(lambda: server.metric("quire_num_requests_running") >= 32)
        before.kill()
        for number, ids in enumerate(results):
            assert ids == (None if number in given_up else undisturbed[number]), number
    assert server.engine.pid != before.pid
    assert server.metric("quire_engine_restarts_total") == 1
    wait_for(lambda: HTTP.get(f"{server.url}/ready").status_code == 200)


def test_a_client_that_leaves_frees_its_memory(server: Server) -> None:
    body = {"model": "smollm2", "prompt": "On and on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: when it goes, the connection goes
        next(lines)
        wait_for(lambda: server.metric("quire_num_requests_running") == 1)
    stream_tokens(server.url, 1)  # the gauges tell of the last step
    assert server.metric("quire_kv_cache_usage_ratio") < 0.001


def test_a_flood_of_nonsense_leaves_it_serving(server: Server) -> None:
    bad = [b"", b"{", b"[]", b'{"model": 1}', b"\xff" * 99, b'{"model": "smollm2"}', b'{"prompt": ' + b"[" * 5000]

    def send(number: int) -> int:
        return HTTP.post(f"{server.url}/v1/completions", content=bad[number % len(bad)]).status_code

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        statuses = set(pool.map(send, range(200)))
    assert statuses <= {400, 413, 415, 422}, statuses
    assert stream_tokens(server.url, 2)

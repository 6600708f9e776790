"""From a model's name to a worker: rules, aliases, canaries, fallbacks, and the policies among equals."""

import asyncio
import json
import random
import signal
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gateways import Asked, RunningGateway, Upstream, answers, gateway, streams, upstreams, wait_for
from quire.core.errors import BadRequest, UnknownModel
from quire.core.known_prefixes import ApproximatePrefixes
from quire.gateway.config import CacheAware, Faults, GatewayConfig, WorkerEntry
from quire.gateway.config_file import parse_config
from quire.gateway.policies import (
    CacheAwarePolicy,
    LeastTokens,
    PickContext,
    Policy,
    PowerOfTwo,
    RoundRobin,
    SessionAffinity,
)
from quire.gateway.prefix_index import BLOCK_BYTES, prompt_blocks
from quire.gateway.request_facts import read_facts, renamed, with_fields
from quire.gateway.router import Router
from quire.gateway.wire import ClientRequest
from quire.gateway.worker import Worker


@pytest.fixture
def make_workers() -> Iterator[Callable[..., list[Worker]]]:
    loop = asyncio.new_event_loop()

    def make(count: int, *models: str, weight: float = 1.0) -> list[Worker]:
        async def made() -> list[Worker]:
            entries = [
                WorkerEntry(url=f"http://h{i}:1", models=list(models or ["m"]), weight=weight) for i in range(count)
            ]
            return [Worker(entry, Faults(), bit) for bit, entry in enumerate(entries)]

        workers = loop.run_until_complete(made())
        for worker in workers:
            worker.ready = True
        return workers

    yield make
    loop.close()


Make = Callable[..., list[Worker]]
CONTEXT = PickContext("t")


def picks(policy: Policy, workers: list[Worker], contexts: list[PickContext]) -> list[int]:
    return [policy.pick(workers, context).bit for context in contexts]


def test_round_robin_takes_turns(make_workers: Make) -> None:
    assert Counter(picks(RoundRobin(), make_workers(3), [CONTEXT] * 9)) == {0: 3, 1: 3, 2: 3}


def test_least_tokens_counts_what_is_in_flight(make_workers: Make) -> None:
    workers = make_workers(3)
    for worker, tokens in zip(workers, (500, 20, 100), strict=True):
        worker.begin(tokens)
    assert picks(LeastTokens(), workers, [CONTEXT]) == [1]
    workers[1].begin(1000)
    assert picks(LeastTokens(), workers, [CONTEXT]) == [2]


def test_power_of_two_evens_the_load(make_workers: Make) -> None:
    workers, policy = make_workers(8), PowerOfTwo(random.Random(3))
    for _ in range(800):
        policy.pick(workers, CONTEXT).begin(1)
    loads = [worker.num_in_flight for worker in workers]
    assert max(loads) - min(loads) <= 6, loads


def test_sessions_stay_and_only_those_of_a_lost_worker_move(make_workers: Make) -> None:
    workers, policy = make_workers(5), SessionAffinity()
    sessions = [PickContext("t", session=f"user-{number}") for number in range(500)]
    before = picks(policy, workers, sessions)
    assert picks(policy, workers, sessions) == before
    assert min(Counter(before).values()) > 60, "they are spread"
    after = picks(policy, workers[:-1], sessions)
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 4)


def test_cache_aware_sends_a_conversation_where_its_prefix_is(make_workers: Make) -> None:
    workers, policy = make_workers(4), CacheAwarePolicy(CacheAware())
    texts = [bytes([65 + number]) * 8 * BLOCK_BYTES for number in range(12)]
    first = [policy.pick(workers, PickContext("t", text)) for text in texts]
    for worker in first:
        worker.begin(1)
    for text, worker in zip(texts, first, strict=True):
        context = PickContext("t", text + b"and a second turn" * 20)
        assert policy.pick(workers, context) is worker
        assert context.predicted_hit > 0.5
    other = PickContext("another tenant", texts[0])
    policy.pick(workers, other)
    assert other.predicted_hit == 0, "prefixes are known within a tenant only"


def test_cache_aware_gives_way_to_load(make_workers: Make) -> None:
    workers, policy = make_workers(2), CacheAwarePolicy(CacheAware(balance_abs_threshold=4))
    text = PickContext("t", b"a" * 10 * BLOCK_BYTES)
    home = policy.pick(workers, text)
    for _ in range(5):
        home.begin(10)
    assert policy.pick(workers, text) is not home


def test_a_busy_worker_is_no_reason_to_leave_another(make_workers: Make) -> None:
    workers, policy = make_workers(3), CacheAwarePolicy(CacheAware(balance_abs_threshold=4))
    text = PickContext("t", b"a" * 10 * BLOCK_BYTES)
    home = policy.pick(workers, text)
    busy = next(worker for worker in workers if worker is not home)
    for _ in range(50):
        busy.begin(10)
    home.begin(10_000)
    assert policy.pick(workers, text) is home, "its prompt is there, and it has one request"


def test_prefixes_are_bounded_and_forgotten() -> None:
    index = ApproximatePrefixes(max_blocks=10)
    blocks = prompt_blocks("t", b"x" * 8 * BLOCK_BYTES)
    index.insert(blocks, 0)
    index.insert(blocks[:4], 1)
    assert index.longest(blocks, 0b11) == (8, 0b01)
    assert index.longest(blocks, 0b10) == (4, 0b10)
    index.insert(prompt_blocks("t", b"y" * 6 * BLOCK_BYTES), 0)
    assert len(index) == 10
    assert index.longest(blocks, 0b11)[0] == 4, "the tail of a prompt is forgotten before its head"
    index.forget(0)
    assert index.longest(blocks, 0b11) == (4, 0b10)


class Cache:
    """The prefix cache of an engine: the least recently used blocks go first."""

    def __init__(self, capacity: int) -> None:
        self._blocks, self._capacity = OrderedDict[int, None](), capacity

    def serve(self, blocks: list[int]) -> int:
        """-> how many leading blocks it had"""
        hits = next((number for number, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return hits


def hit_rate(policy: Policy, workers: list[Worker], capacity: int) -> float:
    """Of conversations that take turns at random, all with the same instructions; 16 requests are in flight."""
    rng, caches = random.Random(5), [Cache(capacity // len(workers)) for _ in workers]
    system = rng.randbytes(16 * BLOCK_BYTES)
    talks = [system + rng.randbytes(4 * BLOCK_BYTES) for _ in range(80)]
    hits = total = 0
    in_flight: list[Worker] = []
    for _ in range(1200):
        number = rng.randrange(len(talks))
        worker = policy.pick(workers, PickContext("t", talks[number]))
        worker.begin(len(talks[number]) // 4)
        in_flight.append(worker)
        if len(in_flight) > 16:
            in_flight.pop(0).end(0)
        blocks = prompt_blocks("t", talks[number])
        hits += caches[worker.bit].serve(blocks)
        total += len(blocks)
        talks[number] += rng.randbytes(2 * BLOCK_BYTES)  # an answer, and the next question
    return hits / total


def test_cache_aware_hits_nearly_as_often_as_one_large_cache(make_workers: Make) -> None:
    """Room for all conversations: spread over four workers, which know a quarter each."""
    capacity = 16 * 4 + 80 * 40
    one = hit_rate(RoundRobin(), make_workers(1), capacity)
    aware = hit_rate(CacheAwarePolicy(CacheAware()), make_workers(4), capacity)
    turns = hit_rate(RoundRobin(), make_workers(4), capacity)
    assert aware > 0.97 * one > turns, f"one {one:.3f}, cache_aware {aware:.3f}, round_robin {turns:.3f}"
    print(f"hit rate: one large cache {one:.3f}, cache_aware {aware:.3f}, round_robin {turns:.3f}")


@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 3), st.integers(0, 9)), max_size=60),
    st.integers(1, 12),
)
def test_the_longest_known_prefix_is_found(steps: list[tuple[str, int, int]], max_blocks: int) -> None:
    """By halving, what a look at every block finds: also when blocks and workers were forgotten."""
    index = ApproximatePrefixes(max_blocks)
    for text, worker, action in steps:
        blocks = prompt_blocks("t", b"".join(bytes([ord(letter)]) * BLOCK_BYTES for letter in text))
        index.forget(worker) if action == 0 else index.insert(blocks, worker)
        assert len(index) <= max_blocks
        depth, knowing = 0, 0b1111
        while depth < len(blocks) and (found := index.workers(blocks[depth]) & knowing):
            depth, knowing = depth + 1, found
        assert index.longest(blocks, 0b1111) == (depth, knowing if depth else 0)


CONFIG = """
default_model = "auto"
[models.auto]
[[models.auto.rules]]
header = {X-Tier = "gold"}
model = "large"
[[models.auto.rules]]
tools = true
model = "large"
[[models.auto.rules]]
schema = true
model = "medium"
[[models.auto.rules]]
max_prompt_tokens = 50
model = "small"
[[models.auto.targets]]
model = "large"
[models."gpt-4o"]
targets = [{model = "medium"}]
[models.medium]
fallbacks = ["large", "small"]
[models.canary]
targets = [{model = "large", weight = 90}, {model = "small", weight = 10}]
"""


def router(workers: list[Worker]) -> Router:
    return Router(parse_config(CONFIG.encode(), "test"), workers, random.Random(1))


def targets(made: Router, headers: list[tuple[bytes, bytes]] | None = None, **body: object) -> list[str | None]:
    path = "/v1/chat/completions"
    facts = read_facts(path, json.dumps(body).encode())
    return made.targets(facts, ClientRequest("POST", path.encode(), path, headers or []))


def test_rules_choose_by_header_tools_schema_and_length(make_workers: Make) -> None:
    made = router(make_workers(1, "small", "medium", "large"))
    short, long = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "word " * 500}]
    assert targets(made, messages=short, model="auto") == ["small"]
    assert targets(made, messages=long, model="auto") == ["large"]
    assert targets(made, messages=short) == ["small"], "the default model"
    assert targets(made, messages=short, model="auto", tools=[{"type": "function"}]) == ["large"]
    assert targets(made, messages=short, model="auto", tools=[]) == ["small"]
    format = {"type": "json_schema"}
    assert targets(made, messages=short, model="auto", response_format=format) == ["medium", "large", "small"]
    assert targets(made, [(b"x-tier", b"gold")], messages=short, model="auto") == ["large"]
    assert targets(made, messages=short, model="gpt-4o") == ["medium", "large", "small"]
    assert targets(made, messages=short, model="small") == ["small"]


def test_canaries_get_their_share(make_workers: Make) -> None:
    made = router(make_workers(1, "small", "large"))
    counts = Counter(targets(made, model="canary")[0] for _ in range(2000))
    assert 120 < counts["small"] < 280


def test_an_unknown_model_names_the_nearest(make_workers: Make) -> None:
    with pytest.raises(UnknownModel, match="there is no model `larg`") as raised:
        targets(router(make_workers(1, "large")), model="larg")
    assert "did you mean `large`?" in raised.value.hint


def test_bodies_are_changed_in_place() -> None:
    body = b'{"model": "a", "stream":true, "messages": [{"content": "\\u00e9 \\ud83d\\ude00", "x": 1.0}], "model": "b"}'
    facts = read_facts("/v1/chat/completions", body)
    assert facts.model == "b" and facts.stream, "the last of two wins, as with the workers"
    changed = json.loads(with_fields(facts, {"model": "c"}))
    assert changed == {**json.loads(body), "model": "c"}
    assert b'\\ud83d\\ude00", "x": 1.0' in with_fields(facts, {"model": "c"}), "what is not changed stays as it was"
    several = read_facts("/v1/completions", b'{"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 10}')
    assert several.n == 6 and several.output_tokens == 60
    assert read_facts("/v1/completions", b'{"prompt": [1, 2, 3], "n": 2}').n == 2
    assert read_facts("/api/chat", b"{}").stream and not read_facts("/api/chat", b'{"stream": false}').stream
    assert read_facts("/v2/models/x/versions/1/generate_stream", b"{}").model == "x"


def test_what_sglangs_bodies_may_cost_is_known() -> None:
    """Their limits stand in `sampling_params`, of all prompts or of each."""
    one = read_facts("/generate", b'{"text": "Hello there", "sampling_params": {"max_new_tokens": 5, "n": 3}}')
    assert (one.n, one.max_tokens, one.prompt) == (3, 5, b'"Hello there"')
    each = b'[{"max_new_tokens": 5, "n": 2}, {"max_new_tokens": 9}]'
    several = read_facts("/generate", b'{"input_ids": [[1], [2]], "sampling_params": ' + each + b"}")
    assert (several.n, several.max_tokens) == (4, 9)
    assert read_facts("/v1/responses", b'{"input": "Hi", "text": {"verbosity": "low"}}').prompt == b'"Hi"'


@pytest.mark.parametrize(
    ("path", "body", "changed"),
    [
        ("/generate", {"text": "Hi", "model": "m", "lora_path": "a"}, {"lora_path": "b"}),
        ("/generate", {"text": ["Hi", "Ho"], "lora_path": ["a", "a"]}, {"lora_path": "b"}),
        (
            "/generate",
            {"inputs": "Hi", "model": "m", "parameters": {"adapter_id": "a", "top_k": 3}},
            {"parameters": {"adapter_id": "b", "top_k": 3}},
        ),
        ("/generate_stream", {"inputs": "Hi", "parameters": {"adapter_id": "a"}}, {"parameters": {"adapter_id": "b"}}),
        ("/", {"inputs": "Hi", "parameters": {"adapter_id": "a"}}, {"parameters": {"adapter_id": "b"}}),
        ("/generate", {"text": "Hi", "model": "a", "lora_path": None}, {"model": "b"}),
        ("/v1/completions", {"prompt": "Hi", "model": "a", "lora_path": "m"}, {"model": "b"}),
        ("/api/show", {"name": "a"}, {"name": "b"}),
    ],
)
def test_a_request_is_for_the_adapter_that_its_body_names(path: str, body: object, changed: dict[str, object]) -> None:
    """A key that may use the model alone could use its adapters."""
    facts = read_facts(path, json.dumps(body).encode())
    assert facts.model == "a"
    assert json.loads(with_fields(facts, renamed(facts, "b"))) == {**json.loads(json.dumps(body)), **changed}


@pytest.mark.parametrize("more", [{"lora_path": ["a", None]}, {"lora_path": "a", "parameters": {"adapter_id": "b"}}])
def test_a_body_names_one_adapter(more: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="several adapters"):
        read_facts("/generate", json.dumps({"text": "Hi", **more}).encode())


# ---- with a running gateway


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, list[Upstream]]]:
    config = """
[models.alias]
targets = [{model = "m"}]
[models.safe]
targets = [{model = "gone"}]
fallbacks = ["m"]
[[workers]]
url = "http://127.0.0.1:9"
models = ["gone"]
"""
    with upstreams(answers("A"), answers("B")) as made:
        config += "".join(f'[[workers]]\nurl = "{each.url}"\nname = "w{i}"\n' for i, each in enumerate(made))
        with gateway(config, "--policy", "round_robin", folder=tmp_path_factory.mktemp("routed")) as running:
            yield running, made


def test_aliases_and_fallbacks_reach_the_worker_under_its_own_name(
    routed: tuple[RunningGateway, list[Upstream]],
) -> None:
    running, made = routed
    for name in ("alias", "safe", "m", None):
        assert running.chat(name).status_code == 200
    assert {asked.json.get("model") for upstream in made for asked in upstream.asked} == {"m", None}
    assert all(upstream.asked for upstream in made), "they take turns"
    gone = running.chat("gone")
    assert gone.status_code == 503 and int(gone.headers["retry-after"]) >= 1


def test_a_name_with_a_slash_is_found_in_a_path(tmp_path: Path) -> None:
    """Clients quote it, and the gateway looked for the quoted name."""
    with upstreams(answers("A"), model="org/m") as [only]:
        config = f'[models."our/m"]\ntargets = [{{model = "org/m"}}]\n[[workers]]\nurl = "{only.url}"\n'
        with gateway(config, folder=tmp_path) as running:
            for name in ("org%2Fm", "org/m", "our%2Fm"):
                assert running.http.get(f"{running.url}/v1/models/{name}").status_code == 200
            assert running.http.post(f"{running.url}/v2/models/our%2Fm/generate", json={}).status_code == 200
            assert only.asked[-1].line.split()[1] == "/v2/models/org%2Fm/generate"


def test_models_of_routes_and_workers_are_listed(routed: tuple[RunningGateway, list[Upstream]]) -> None:
    names = [card["id"] for card in routed[0].http.get(f"{routed[0].url}/v1/models").json()["data"]]
    assert names == ["alias", "gone", "m", "safe"]


def test_a_worker_is_added_drained_and_removed_while_it_runs(routed: tuple[RunningGateway, list[Upstream]]) -> None:
    running, _made = routed
    admin = running.admin
    with upstreams(answers("C"), model="new") as [third]:
        added = running.http.post(f"{admin}/workers", json={"url": third.url, "name": "third"})
        assert added.status_code == 201
        assert running.http.post(f"{admin}/workers", json={"url": third.url, "name": "third"}).status_code == 400
        assert running.http.post(f"{admin}/workers", json={"url": "ftp://x"}).status_code == 400
        assert running.http.post(f"{admin}/workers", json={"url": third.url, "colour": 1}).status_code == 400
        wait_for(lambda: running.workers()["third"]["state"] == "ready")
        assert running.chat("new").status_code == 200
        assert running.http.post(f"{admin}/workers/third/drain").json()["state"] == "draining"
        assert running.chat("new").status_code == 503
        running.http.post(f"{admin}/workers/third/resume")
        assert running.chat("new").status_code == 200
        assert running.http.delete(f"{admin}/workers/third").status_code == 200
    assert "third" not in running.workers()
    assert running.chat("new").status_code == 404
    assert running.http.delete(f"{admin}/workers/third").status_code == 404
    assert running.http.put(f"{admin}/workers").status_code == 405


def test_config_is_read_again_and_stays_where_it_is_wrong(tmp_path: Path) -> None:
    """A stream in flight ends at its worker, although the file does not have it any more."""
    begun, go = threading.Event(), threading.Event()

    def waiting(connection: socket.socket, asked: Asked) -> bool:
        begun.set()
        assert go.wait(20)
        return streams("late")(connection, asked)

    with upstreams(waiting, answers("B")) as [first, second], ThreadPoolExecutor(1) as pool:
        table = '[[workers]]\nurl = "{}"\nname = "{}"\n'
        with gateway(table.format(first.url, "one"), folder=tmp_path) as running:
            file = tmp_path / "gateway.toml"
            stream = pool.submit(running.chat, stream=True)
            assert begun.wait(20)
            file.write_text(table.format(second.url, "two") + '[models.nick]\ntargets = [{model = "m"}]\n')
            running.process.send_signal(signal.SIGHUP)
            wait_for(lambda: list(running.workers()) == ["two"] and running.workers()["two"]["state"] == "ready")
            assert "B" in running.chat("nick").text
            go.set()
            assert "late" in stream.result().text
            file.write_text("nonsense = 1")
            running.process.send_signal(signal.SIGHUP)
            wait_for(lambda: any("stays as it was" in line for line in running.said))
            assert running.chat("nick").status_code == 200


def test_a_config_is_checked_as_a_whole() -> None:
    config = """
admin_host = "0.0.0.0"
[[workers]]
url = "localhost:8000"
models = ["smal"]
[[workers]]
url = "http://a:1"
name = "x"
models = ["large"]
[[workers]]
url = "http://b:1"
name = "x"
models = []
[models.a]
targets = [{model = "b"}]
fallbacks = ["larg"]
[models.b]
targets = [{model = "a"}]
[[keys]]
name = "k"
"""
    with pytest.raises(BadRequest) as raised:
        parse_config(config.encode(), "gateway.toml")
    for part in (
        "problems",
        "admin_key",
        "`localhost:8000` is no address",
        "two workers are called x",
        "`k` has to have one of key and sha256",
        "leads to `larg`, which no worker serves (did you mean `large`?)",
        "leads back to itself",
    ):
        assert part in raised.value.message, part
    for wrong in ("polcy = 1", 'policy = "fastest"', "port = 70000", "[queue]\nmax_requests = 0", "[[workers]]\n", "x"):
        with pytest.raises(BadRequest, match=r"gateway\.toml"):
            parse_config(wrong.encode(), "gateway.toml")
    assert parse_config(b"", "x") == GatewayConfig()

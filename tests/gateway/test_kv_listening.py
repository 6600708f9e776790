"""KV events over real sockets: publisher and listener, and a gateway in front of real engines."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gateway.gateways import RunningGateway, gateway, wait_for
from quire.core.errors import BadRequest
from quire.core.kv_events import KVEvents, StoredBlocks, block_hashes, root_hash
from quire.core.prefix_tree import PrefixTree
from quire.engine.kv_events_config import KVEventsConfig, read_kv_events_config
from quire.engine.options import EngineOptions
from quire.gateway import kv_listener
from quire.gateway.kv_follower import BatchFollower
from quire.gateway.kv_index import KVIndex
from quire.gateway.kv_listener import KVListener
from serving.test_serving import SECONDS, Server, start

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
from quire.engine.kv_publisher import KVPublisher  # noqa: E402


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def endpoints() -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


class PublishedTree:
    """A prefix tree whose changes are published, as an engine does it."""

    def __init__(self, events: str, replay: str | None, **config: Any) -> None:
        settings = KVEventsConfig(enable_kv_cache_events=True, endpoint=events, replay_endpoint=replay, **config)
        self.tree, self.events = PrefixTree(2), KVEvents()
        self.tree.listener = self.events
        self.publisher = KVPublisher(settings, 2)
        self._block = 0

    def store(self, *tokens: int) -> None:
        node = None
        for place in range(0, len(tokens), 2):
            pair = tokens[place : place + 2]
            path = self.tree.match(("", "", ""), node, list(tokens), place // 2, place // 2 + 1)
            node = path[0] if path else self.tree.insert(("", "", ""), node, pair, self._next())
        self.publisher.publish(self.events.take())

    def _next(self) -> int:
        self._block += 1
        return self._block

    def drop(self, block: int) -> None:
        self.tree.remove(block)
        self.publisher.publish(self.events.take())

    @property
    def hashes(self) -> set[int]:
        return {node.hash for node in self.tree.walk()}


async def until(met: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not met():
            await asyncio.sleep(0.005)


def run(work: Coroutine[Any, Any, None]) -> None:
    import uvloop

    uvloop.run(work)


class Listening:
    def __init__(self, events: str, replay: str | None, topic: str = "") -> None:
        self.index, self.context = KVIndex(1000), zmq.Context()
        self.follower = BatchFollower(lambda batch: self.index.apply(0, batch), can_ask=replay is not None)
        self.listener = KVListener("w", events, replay, topic, self.follower, self.context)

    async def sees(self, tree: PublishedTree) -> None:
        await until(lambda: self.follower.in_step and self.index.blocks(0) == tree.hashes)

    async def close(self) -> None:
        await self.listener.close()
        self.context.destroy(0)


def test_what_is_published_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that comes late begins with a snapshot; one that is behind is repaired; a restart is noticed."""
    monkeypatch.setattr(kv_listener, "CHECK_SECONDS", 0.05)

    async def work() -> None:
        events, replay = endpoints()
        tree = PublishedTree(events, replay, topic="kv", buffer_steps=3)
        tree.store(1, 2, 3, 4)
        listening = Listening(events, replay, topic="kv")
        await listening.sees(tree)
        tree.store(1, 2, 5, 6)
        tree.drop(2)
        await listening.sees(tree)
        listening.follower._next, listening.follower._time = 1, 0.5  # as if it had missed all since
        listening.index.clear(0)
        await listening.sees(tree)
        tree.publisher.close()
        other = PublishedTree(events, replay, topic="kv")
        other.store(7, 8)
        await listening.sees(other)
        await listening.close()
        other.publisher.close()

    run(work())


def test_without_a_replay_events_are_followed_from_now_on() -> None:
    async def work() -> None:
        events, _ = endpoints()
        tree = PublishedTree(events, None)
        listening = Listening(events, None)
        await asyncio.sleep(0.2)  # it subscribes meanwhile
        tree.store(1, 2)
        await until(lambda: listening.index.blocks(0) == tree.hashes)
        await listening.close()
        tree.publisher.close()

    run(work())


def test_nonsense_on_the_wire_is_told_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        events, _ = endpoints()
        context = zmq.Context()
        publisher = context.socket(zmq.PUB)
        publisher.bind(events)
        listening = Listening(events, None)
        await asyncio.sleep(0.2)
        good = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2], 2, None]]])
        for frames in ([b"", b"x"], [b"", b"\0" * 8, b"\xc1"], [b"", (1).to_bytes(8), good]):
            publisher.send_multipart(frames)
        await until(lambda: listening.index.num_blocks(0) == 1)
        await listening.close()
        context.destroy(0)

    run(work())
    assert "cannot be read" in caplog.text


# -- options


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"endpont": "tcp://*:1"}', "did you mean endpoint"),
        ('{"endpoint": "http://x"}', "write tcp://HOST:PORT"),
        ('{"buffer_steps": 0}', "at least 1"),
        ('{"publisher": "kafka"}', "choose from zmq, null"),
        ('{"enable_kv_cache_events": 1}', "true or false"),
        ('{"topic": 1}', "give a text"),
    ],
)
def test_a_wrong_configuration_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BadRequest, match="kv_events_config") as refused:
        read_kv_events_config(text)
    assert problem in f"{refused.value} {refused.value.hint}"


def test_events_need_the_prefix_cache_and_a_free_port() -> None:
    on = '{"enable_kv_cache_events": true}'
    assert EngineOptions(kv_events_config='{"endpoint": "tcp://*:1"}').kv_events is None, "they are off unless enabled"
    assert EngineOptions.of({"kv_events_config": {"enable_kv_cache_events": True}}).kv_events is not None
    with pytest.raises(BadRequest, match="enable_prefix_caching is off"):
        EngineOptions(kv_events_config=on, enable_prefix_caching=False)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadRequest, match="cannot publish KV events"):
        port = taken.getsockname()[1]
        KVPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}"), 2)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [("tcp://*:5557", True), ("tcp://127.0.0.1:5557", True), ("ipc:///tmp/x", True), ("tcp://router:5557", False)],
)
def test_which_endpoints_are_listened_on(endpoint: str, binds: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint).binds is binds


def test_a_stored_event_has_vllms_fields() -> None:
    from quire.engine.kv_batch_log import BatchLog

    log = BatchLog(2, 10)
    event = StoredBlocks(None, ("t", "s", "lora#3"), block_hashes(root_hash([]), [1, 2, 3, 4], 2), [(1, 2), (3, 4)])
    time, [wire], rank = msgspec.msgpack.decode(log.append([event])[1])
    assert isinstance(time, float) and rank == 0
    assert wire["extra_keys"] == [["tenant:t", "s", "adapter:lora#3"], None] and wire["lora_name"] == "lora"
    assert wire["token_ids"] == [1, 2, 3, 4] and wire["parent_block_hash"] is None and wire["medium"] == "GPU"


# -- engines

FLAGS = ("--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8", "--max-model-len", "1024")


class Engines:
    """Two servers that publish events, and a gateway that routes by them."""

    def __init__(self, folder: Path) -> None:
        self.endpoints = {name: endpoints() for name in "ab"}
        self.servers = {name: self._start(name) for name in "ab"}
        workers = "".join(
            f'[[workers]]\nname = "{name}"\nurl = "{self.servers[name].url}"\n'
            f'kv_events = "{events}"\nkv_replay = "{replay}"\n'
            for name, (events, replay) in self.endpoints.items()
        )
        config = 'policy = "cache_aware"\n[models.smollm2]\ntokenizer = "smollm2"\n[faults]\nhealth_interval = 0.2\n'
        self.context = gateway(config + workers, folder=folder)
        self.gateway: RunningGateway = self.context.__enter__()

    def _start(self, name: str) -> Server:
        events, replay = self.endpoints[name]
        config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
        return start("--served-model-name", "smollm2", "--kv-events-config", json.dumps(config), *FLAGS)

    def ask(self, content: str, **more: object) -> tuple[dict[str, Any], str]:
        """-> usage, and the worker that answered"""
        before = {name: self.gateway.metric("decisions_total", f'worker="{name}"') for name in "ab"}
        answer = self.gateway.chat("smollm2", content, max_tokens=4, **more)
        assert answer.status_code == 200, answer.text
        wait_for(lambda: sum(self._taken(before).values()) == 1)
        [worker] = [name for name, count in self._taken(before).items() if count]
        return answer.json()["usage"], worker

    def _taken(self, before: dict[str, float]) -> dict[str, float]:
        return {name: self.gateway.metric("decisions_total", f'worker="{name}"') - before[name] for name in "ab"}

    def in_step(self) -> bool:
        return all(worker["kv_in_step"] for worker in self.gateway.workers().values())


@pytest.fixture(scope="module")
def engines(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.context.__exit__(None, None, None)
    for server in made.servers.values():
        with suppress(ProcessLookupError):
            server.process.send_signal(signal.SIGTERM)
        server.process.wait(SECONDS)
        server.process.stderr.close()  # type: ignore[union-attr]


def story(number: int) -> str:
    return f"Story {number}. " + " ".join(
        f"Ship {each} of {number} passed the lighthouse at night." for each in range(12)
    )


@pytest.mark.slow
def test_requests_go_where_their_blocks_are(engines: Engines) -> None:
    """Blocks that the gateway never sent a request for count, too: they were computed for someone else."""
    wait_for(lambda: engines.in_step() and any("tokenizer of model" in line for line in engines.gateway.said))
    for name, number in (("a", 1), ("b", 2)):  # past the gateway
        asked = {"model": "smollm2", "messages": [{"role": "user", "content": story(number)}], "max_tokens": 4}
        assert (
            engines.gateway.http.post(f"{engines.servers[name].url}/v1/chat/completions", json=asked).status_code == 200
        )
    wait_for(lambda: all(worker["kv_blocks"] for worker in engines.gateway.workers().values()))  # type: ignore[misc]
    for number, name in ((1, "a"), (2, "b"), (1, "a"), (2, "b")):
        usage, worker = engines.ask(story(number))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert worker == name and cached >= usage["prompt_tokens"] - 17, "all but its last block"
    wait_for(engines.in_step)


@pytest.mark.slow
def test_the_index_is_the_engines(engines: Engines) -> None:
    """What it expects in the cache is found there. After a reset that is nothing, and after a crash of the engine."""
    for number in range(3, 6):
        engines.ask(story(number))
    before = engines.gateway.metric("predicted_cached_tokens_total")
    usage, worker = engines.ask(story(4))
    predicted = engines.gateway.metric("predicted_cached_tokens_total") - before
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert predicted > 0 and cached >= usage["prompt_tokens"] - 17
    for server in engines.servers.values():
        engines.gateway.http.post(f"{server.url}/reset_prefix_cache")
    wait_for(lambda: not any(each["kv_blocks"] for each in engines.gateway.workers().values()))
    _, worker = engines.ask(story(6))
    wait_for(lambda: engines.gateway.workers()[worker]["kv_blocks"])
    [child] = psutil.Process(engines.servers[worker].process.pid).children()
    child.kill()
    wait_for(lambda: not engines.gateway.workers()[worker]["kv_blocks"])
    wait_for(engines.in_step)
    engines.ask(story(7))


@pytest.mark.slow
def test_what_a_pool_has_evicted_to_disk_is_known_to_be_there(default_model: Path, tmp_path: Path) -> None:
    events, replay = endpoints()
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    flags = ["--threads", "1", "--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "2", "--max-model-len", "256"]
    flags += ["--served-model-name", "smollm2", "--kv-disk-path", str(tmp_path / "kv")]
    server = start("--kv-events-config", json.dumps(config), *flags)
    worker = f'[[workers]]\nurl = "{server.url}"\nkv_events = "{events}"\nkv_replay = "{replay}"\n'
    toml = f'policy = "cache_aware"\n[models.smollm2]\ntokenizer = "smollm2"\n{worker}'
    with gateway(toml, folder=tmp_path) as running:
        wait_for(lambda: running.metric("worker_kv_in_step") and any("tokenizer of" in line for line in running.said))
        for number in range(1, 5):
            assert running.chat("smollm2", story(number), max_tokens=1).status_code == 200
            least = 8 * number  # fewer blocks than so many stories have
            wait_for(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) >= least)  # noqa: B023
        exposed = running.http.get(f"{server.url}/metrics").text
        num_pool = float(re.findall(r"^quire_kv_cache_blocks\{.*\} (\S+)", exposed, re.MULTILINE)[0])
        assert 0 < num_pool < 8 * 4, "it has no room for all of them"
        wait_for(lambda: running.metric("worker_kv_blocks") > num_pool)
        usage = running.chat("smollm2", story(1), max_tokens=1).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] - 17, "it was read, where the gateway expected it"
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(SECONDS)
    server.process.stderr.close()  # type: ignore[union-attr]

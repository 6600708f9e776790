"""Prefill and decode engines behind one service: whatever dies, every answer is that of one engine alone."""

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.engine_group import EngineGroup
from quire.client.generate_request import GenerateRequest
from quire.client.watchdog import STALL_SECONDS
from quire.core.errors import BadRequest, Unsupported
from quire.core.records import SchedulerStats, TransferStats, merged
from quire.engine.options import EngineOptions
from quire.server.observe.metrics import ModelMetrics
from quire.server.options import ServerOptions
from trials import LENGTH

TEXT = "A quire is four sheets of paper or parchment folded to form eight leaves, as in medieval manuscripts. "
NUM_STREAMS = 8
ROOM = 0.01  # GiB: what arrives for all streams finds a place, and none computes its prompt itself for want of one
LONG = pytest.mark.skipif(LENGTH == 1, reason="it takes minutes: `make trials`")


def request(number: int, **changes: Any) -> GenerateRequest:
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": number, "ignore_eos": True, "logprobs": 0}
    return GenerateRequest(
        id=f"r{number}", params=SamplingParams(**params, n=1 + number % 2), prompt=f"{number}. {TEXT}{TEXT}", **changes
    )


Answer = list[list[tuple[int, float]]]  # by sample: tokens with their logprobs


async def read(service: EngineGroup | EngineClient, wanted: GenerateRequest) -> Answer:
    answer: Answer = [[] for _ in range(wanted.params.n)]
    async for event in await service.submit(wanted):
        answer[event.index] += zip(event.token_ids, [row[0].logprob for row in event.logprobs or []], strict=True)
    return answer


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[Answer]:
    llm, answers = LLM(tiny_model), []
    for number in range(NUM_STREAMS):
        wanted = request(number)
        [result] = llm.generate([wanted.prompt or ""], wanted.params, use_tqdm=False)
        answers.append(
            [
                [(token, row[token].logprob) for token, row in zip(o.token_ids, o.logprobs or [], strict=True)]
                for o in result.outputs
            ]
        )
    return answers


def run(main: Coroutine[Any, Any, None], seconds: float = 120) -> None:
    asyncio.run(asyncio.wait_for(main, seconds))


def observed(group: EngineGroup) -> ModelMetrics:
    metrics = ModelMetrics()
    group.observe(metrics.engine)
    return metrics


async def until_connected(group: EngineGroup, metrics: ModelMetrics) -> None:
    """The gauge is of the last step: short requests make steps."""
    while True:
        await asyncio.gather(*(read(client, short(10_000 + i)) for i, client in enumerate(group.decode)))
        if getattr(metrics.now.transfers, "peers", 0) == len(group.prefill) * len(group.decode):
            return
        await asyncio.sleep(0.02)


def short(number: int) -> GenerateRequest:
    return GenerateRequest(id=f"r{number}", params=SamplingParams(max_tokens=2, logprobs=0), prompt="A")


async def kill(group: EngineGroup, chance: random.Random, count: int) -> None:
    """Engines of either kind in turns, at any moment."""
    for number in range(count):
        await asyncio.sleep(chance.choice((0.0, 0.02, 0.1, 0.3)))
        if number % 2 == 0:
            engine = chance.choice(group.prefill)
            while not engine.is_ready:
                await asyncio.sleep(0.002)
            os.kill(engine.pid, signal.SIGKILL)
            while engine.is_ready:
                await asyncio.sleep(0.002)
        else:
            client = chance.choice(group.decode)
            while client.state != "ready":
                await asyncio.sleep(0.002)
            os.kill(client.engine_pid, signal.SIGKILL)
            while client.state == "ready":
                await asyncio.sleep(0.002)


@pytest.mark.timeout(120 + 200 * LENGTH)
@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_kills"),
    [(1, 1, 2), pytest.param(2, 2, 20 * LENGTH, marks=[pytest.mark.trial, LONG])],
    ids=["one and one", "two and two"],
)
def test_random_kills_of_either_side_lose_nothing(
    tiny_model: Path, undisturbed: list[Answer], num_prefill: int, num_decode: int, num_kills: int
) -> None:
    async def main() -> None:
        async with EngineGroup(EngineOptions(model=str(tiny_model)), num_prefill, num_decode) as group:
            metrics = observed(group)
            await until_connected(group, metrics)
            salts = iter(range(10**9))
            killing = asyncio.create_task(kill(group, random.Random(num_kills), num_kills))
            streams = NUM_STREAMS if num_kills < 10 else 64
            reading = [read_again_and_again(group, undisturbed, killing, number, salts) for number in range(streams)]
            await asyncio.gather(*reading, killing)
            await until_connected(group, metrics)
            again = [request(number, salt="again") for number in range(NUM_STREAMS)]
            assert await asyncio.gather(*(read(group, each) for each in again)) == undisturbed
            assert metrics.restarts == num_kills and metrics.finished["error"] == 0
            assert metrics.transfer_total("prefills") > 0 and metrics.transfer_total("sent_bytes") > 0
            await no_block_is_stranded(group, metrics)

    run(main(), 100 + 10 * num_kills)


async def read_again_and_again(
    group: EngineGroup, undisturbed: list[Answer], killing: "asyncio.Task[None]", stream: int, salts: Any
) -> None:
    number = stream % NUM_STREAMS
    while True:
        salt = next(salts)
        wanted = request(number, salt=str(salt))
        wanted.id = f"s{salt}"
        assert await read(group, wanted) == undisturbed[number]
        if killing.done():
            return


async def no_block_is_stranded(group: EngineGroup, metrics: ModelMetrics) -> None:
    """Soon, and as the last steps of all engines tell."""
    while True:
        await asyncio.gather(*(read(client, short(20_000 + i)) for i, client in enumerate(group.decode)))
        transfers = metrics.now.transfers
        if transfers is not None and transfers.in_flight == metrics.now.held_blocks == 0:
            return
        await asyncio.sleep(0.05)


def test_answers_of_two_engines_are_those_of_one(tiny_model: Path, undisturbed: list[Answer]) -> None:
    async def main() -> None:
        async with EngineGroup(EngineOptions(model=str(tiny_model), swap_space=ROOM), 1, 1) as group:
            metrics = observed(group)
            assert group.info.max_requests == 256 + 1024 and group.state == "ready"
            await until_connected(group, metrics)
            answers = await asyncio.gather(*(read(group, request(number)) for number in range(NUM_STREAMS)))
            assert answers == undisturbed
            assert metrics.transfer_total("prefills") == NUM_STREAMS and metrics.transfer_total("failed") == 0
            assert metrics.transfer_total("tokens") > NUM_STREAMS * 190
            assert 0 < metrics.transfer_total("sent_bytes") <= metrics.transfer_total("received_bytes")
            assert metrics.cached_tokens == 0 and metrics.restarts == 0
            assert await group.reset_prefix_cache()
            folder = group._folder
            assert len(list(folder.iterdir())) == 1
        assert not folder.exists()

    run(main())


def test_a_stopped_prefill_engine_is_killed_and_answers_go_on(
    tiny_model: Path, undisturbed: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with EngineGroup(EngineOptions(model=str(tiny_model)), 1, 1) as group:
            metrics, [engine] = observed(group), group.prefill
            await until_connected(group, metrics)
            engine._watchdog.seconds = 0.5
            pid = engine.pid
            os.kill(pid, signal.SIGSTOP)
            reading = asyncio.gather(*(read(group, request(number)) for number in range(NUM_STREAMS)))
            while engine.is_ready:
                await asyncio.sleep(0.002)
            engine._watchdog.seconds = STALL_SECONDS  # the next one may take its time
            assert await reading == undisturbed
            while engine.pid == pid:
                await asyncio.sleep(0.002)
            assert metrics.restarts == 1 and metrics.transfer_total("failed") > 0

    run(main())


def test_two_servers_hand_blocks_over_by_tcp(tiny_model: Path, undisturbed: list[Answer]) -> None:
    """The consumer starts before the producer, and goes on after it."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = {"kv_ip": "127.0.0.1", "kv_port": port}
        roles = [json.dumps({"kv_role": role, **config}) for role in ("kv_producer", "kv_consumer")]
        common = {"model": str(tiny_model), "swap_space": ROOM}
        there, here = (EngineOptions.of({**common, "kv_transfer_config": text}) for text in roles)
        metrics = ModelMetrics()
        async with EngineClient(here, metrics) as consumer:
            assert await read(consumer, request(0, salt="alone")) == undisturbed[0]
            async with EngineClient(there) as producer:
                number = 100
                while getattr(metrics.now.transfers, "peers", 0) == 0:
                    await read(consumer, short(number := number + 1))
                    await asyncio.sleep(0.02)
                answers = await asyncio.gather(*(read(consumer, request(i)) for i in range(NUM_STREAMS)))
                assert answers == undisturbed and metrics.transfer_total("prefills") == NUM_STREAMS
                assert await read(producer, request(1, salt="own")) == undisturbed[1], "it answers, too"
            assert await read(consumer, request(2, salt="alone again")) == undisturbed[2]

    run(main())


def test_what_cannot_be_had_is_refused_by_name(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="kv_transfer_config is given, and prefill_engines too"):
        EngineGroup(EngineOptions(kv_transfer_config='{"kv_role": "kv_consumer"}'), 1, 1)
    monkeypatch.setattr("quire.client.engine_group.uses_gpu", lambda device: True)
    with pytest.raises(Unsupported, match="prefill_engines are for CPUs"):
        EngineGroup(EngineOptions(), 1, 1)
    with pytest.raises(BadRequest, match="decode_engines is 2, and there are no prefill engines"):
        ServerOptions(decode_engines=2)
    with pytest.raises(BadRequest, match="prefill_engines are for one model"):
        ServerOptions(prefill_engines=1, models=["a=b"])


def test_figures_of_several_engines_are_added() -> None:
    one = SchedulerStats(running=2, block_size=16, accepted_at=[3, 1], transfers=TransferStats(tokens=5, peers=1))
    other = SchedulerStats(running=1, block_size=16, accepted_at=[1], transfers=None)
    total = merged([one, other])
    assert (total.running, total.block_size, total.accepted_at) == (3, 16, [4, 1])
    assert total.transfers == TransferStats(tokens=5, peers=1)
    metrics = ModelMetrics()
    metrics.engine(0).rests(one)
    metrics.engine(1).rests(other)
    metrics.engine(0).restarted()
    assert metrics.now.running == 1 and metrics.transfer_total("tokens") == 5 and metrics.accepted_at == [4, 1]

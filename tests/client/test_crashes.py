"""A crash is charged to its cause: whoever else was there goes on as if nothing had happened."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import poisoned_engine
from engine.tiny_encoders import TEXTS, save_encoder
from quire import LLM, Embedder, SamplingParams
from quire.client import restarts
from quire.client.embed_request import EmbedRequest
from quire.client.engine_client import EngineClient
from quire.client.engine_process import EngineProcess
from quire.client.generate_request import GenerateRequest
from quire.core.errors import DeadlinePassed, EngineFailed
from quire.core.structured import Structured
from quire.engine.options import EngineOptions
from quire.runtime.kv_files import is_whole
from quire.server.observe.metrics import ModelMetrics
from trials import LENGTH, rounds

NUM_BYSTANDERS = 16
NUM_KILLS = rounds(4)


class PoisonedProcess(EngineProcess):
    program = (poisoned_engine.__file__,)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.client.engine_client.EngineProcess", PoisonedProcess)


def run(main: Coroutine[Any, Any, None], seconds: float = 120) -> None:
    asyncio.run(asyncio.wait_for(main, seconds))


def request(number: int, prompt: str = "", **params: Any) -> GenerateRequest:
    given = {"max_tokens": 60, "temperature": 0.8, "seed": number, "ignore_eos": True, **params}
    return GenerateRequest(id=f"r{number}", params=SamplingParams(**given), prompt=prompt or f"Chapter {number}. ")


async def read(client: EngineClient, wanted: GenerateRequest, tokens: list[int] | None = None) -> list[int]:
    tokens = [] if tokens is None else tokens
    async for event in await client.submit(wanted):
        tokens += event.token_ids
    return tokens


@pytest.fixture(scope="module")
def bystanders(tiny_model: Path) -> list[GenerateRequest]:
    return [request(number) for number in range(NUM_BYSTANDERS)]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, bystanders: list[GenerateRequest]) -> list[list[int]]:
    llm = LLM(tiny_model)
    return [llm.generate(one.prompt or "", one.params)[0].outputs[0].token_ids for one in bystanders]


GRAMMAR = Structured("regex", f"({poisoned_engine.POISONOUS_GRAMMAR})+")
POISONS = {
    "an abort in the first step": [request(100, "~")],
    "an abort after five tokens, and an exception in the first step": [request(101, "^"), request(102, "|")],
    "an exception when it is submitted, and an abort while its grammar is compiled": [
        request(103, "@"),
        request(104, "x", structured=GRAMMAR),
    ],
}


@pytest.mark.parametrize("given", POISONS.values(), ids=POISONS)
@pytest.mark.usefixtures("poisoned")
def test_a_poisonous_request_is_answered_after_three_crashes_and_the_others_lose_nothing(
    tiny_model: Path, bystanders: list[GenerateRequest], undisturbed: list[list[int]], given: list[GenerateRequest]
) -> None:
    metrics = ModelMetrics()

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model)), metrics) as client:
            others = [asyncio.create_task(read(client, one)) for one in bystanders]
            poisons: list[tuple[GenerateRequest, list[int]]] = [(poison, []) for poison in given]
            answers = [asyncio.create_task(read(client, poison, tokens)) for poison, tokens in poisons]
            assert await asyncio.gather(*others) == undisturbed
            for answer, (poison, tokens) in zip(answers, poisons, strict=True):
                with pytest.raises(EngineFailed, match="3 times while it worked on this request"):
                    await answer
                assert len(tokens) == (poisoned_engine.NUM_BEFORE_LATE if poison.prompt == "^" else 0)
            assert await read(client, bystanders[0]) == undisturbed[0]

    run(main())
    assert metrics.charged == metrics.finished["error"] == len(given)
    assert metrics.restarts <= 3 * len(given)
    assert 0 < metrics.retried <= metrics.restarts * (NUM_BYSTANDERS + len(given))


@pytest.mark.usefixtures("poisoned")
def test_a_poisonous_text_is_answered_after_three_crashes_and_the_others_lose_nothing(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    metrics = ModelMetrics()

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tmp_path), max_num_batched_tokens=16), metrics) as client:
            others = [asyncio.create_task(client.embed(EmbedRequest(id=f"e{n}", texts=TEXTS * 20))) for n in range(4)]
            poison = [*[[5, 6]] * 10, [5, poisoned_engine.POISONOUS_TEXT]]
            with pytest.raises(EngineFailed, match="3 times while it worked on this request"):
                await client.embed(EmbedRequest(id="poison", texts=poison))
            for answer in await asyncio.gather(*others):
                assert np.array_equal(np.array(answer.vectors), expected)

    expected = Embedder(tmp_path).embed(TEXTS * 20)
    run(main())
    assert metrics.charged == 1 and metrics.restarts == 3


@pytest.mark.trial
@pytest.mark.parametrize("has_disk", [False, True], ids=["", "with prefixes on disk"])
def test_random_kills_lose_nothing(
    tiny_model: Path,
    bystanders: list[GenerateRequest],
    undisturbed: list[list[int]],
    tmp_path: Path,
    has_disk: bool,
) -> None:
    chance, metrics = random.Random(5), ModelMetrics()
    options = EngineOptions(model=str(tiny_model), kv_disk_path=str(tmp_path) if has_disk else None)

    async def kill(client: EngineClient) -> None:
        for _ in range(NUM_KILLS):
            while client.state != "ready":
                await asyncio.sleep(0.001)
            await asyncio.sleep(chance.choice((0.0, 0.002, 0.01, 0.05)))
            os.kill(client.engine_pid, signal.SIGKILL)
            while client.state == "ready":
                await asyncio.sleep(0.001)

    async def read_again_and_again(client: EngineClient, number: int, killing: "asyncio.Task[None]") -> int:
        num_read = 0
        while not num_read or not killing.done():
            assert await read(client, bystanders[number]) == undisturbed[number]
            num_read += 1
        return num_read

    async def main() -> None:
        async with EngineClient(options, metrics) as client:
            killing = asyncio.create_task(kill(client))
            await asyncio.gather(*(read_again_and_again(client, number, killing) for number in range(NUM_BYSTANDERS)))

    run(main(), 120 * LENGTH)
    assert metrics.restarts == NUM_KILLS and metrics.charged == 0 and metrics.finished["error"] == 0
    files = list(tmp_path.rglob("*.kv"))
    assert (len(files) > NUM_BYSTANDERS) == has_disk and all(is_whole(file) for file in files)


def test_kills_while_an_engine_starts_are_no_reason_to_give_up(
    tiny_model: Path, bystanders: list[GenerateRequest], undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "MAX_DELAY_AFTER_KILL", 0.0)

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            reading = asyncio.create_task(read(client, bystanders[0]))
            for _ in range(restarts.MAX_RESTARTS + 2):
                pid = client.engine_pid
                os.kill(pid, signal.SIGKILL)
                while client.engine_pid == pid:
                    await asyncio.sleep(0.001)
            assert await reading == undisturbed[0]

    run(main())


def test_deadlines_count_while_the_engine_restarts(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            os.kill(client.engine_pid, signal.SIGSTOP)  # it does not answer before it dies
            stream = await client.submit(replace(request(1, max_tokens=480), timeout=0.2))
            os.kill(client.engine_pid, signal.SIGKILL)
            time.sleep(0.2)
            with pytest.raises(DeadlinePassed):
                async for _ in stream:
                    pass

    run(main())

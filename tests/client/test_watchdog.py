"""An engine that was stopped (SIGSTOP) is noticed, and deadlines hold without it."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.core.errors import DeadlinePassed
from quire.engine.options import EngineOptions


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def request(name: str, **given: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
    return GenerateRequest(id=name, params=params, prompt="Once", **given)


def quick_client(model: Path) -> EngineClient:
    """Its engine may be silent for a second."""
    client = EngineClient(EngineOptions(model=str(model)))
    client._watchdog.seconds = 1.0
    return client


async def state(client: EngineClient, wanted: str) -> None:
    while client.state != wanted:
        await asyncio.sleep(0.01)


def test_a_stopped_engine_is_stalled_until_it_goes_on(tiny_model: Path) -> None:
    async def main() -> None:
        async with quick_client(tiny_model) as client:
            os.kill(client.engine_pid, signal.SIGSTOP)
            try:
                assert client.state == "ready", "it has nothing to do"
                stream = await client.submit(request("first"))
                await state(client, "stalled")
                second = await client.submit(request("second"))  # also while it is stalled
            finally:
                os.kill(client.engine_pid, signal.SIGCONT)
            for each in (stream, second):
                assert sum([len(event.token_ids) async for event in each]) == 300
            assert client.state == "ready"

    run(main())


def test_a_deadline_holds_while_the_engine_is_stopped(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            async for _ in await client.submit(request("warm")):
                pass
            os.kill(client.engine_pid, signal.SIGSTOP)
            begin = time.monotonic()
            try:
                stream = await client.submit(request("late", timeout=0.3))
                with pytest.raises(DeadlinePassed):
                    async for _ in stream:
                        pass
            finally:
                os.kill(client.engine_pid, signal.SIGCONT)
            assert time.monotonic() - begin >= 0.3 and not client.busy

    run(main())


def test_an_engine_that_compiles_answers_pings(tiny_model: Path) -> None:
    """Without steps there are no messages, and yet it is not stalled."""

    async def main() -> None:
        async with quick_client(tiny_model) as client:
            heard: list[float] = []
            client._watchdog.heard = lambda: heard.append(time.monotonic())  # type: ignore[method-assign]
            client._watchdog._is_busy = lambda: True
            while len(heard) < 3:
                await asyncio.sleep(0.01)

    run(main())

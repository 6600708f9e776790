"""The supervised engine process: killed, cancelled, drained, and nobody loses a token."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_kills import check_that_a_kill_loses_nothing
from quire import LLM, AsyncEngine, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.client.prompt import LONG_TEXT
from quire.client.service import TokenGap
from quire.core.errors import BadCheckpoint, BadRequest, EngineFailed, QueueFull, Unavailable
from quire.engine.options import EngineOptions


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 90))


def request(number: int, **params: Any) -> GenerateRequest:
    given = {"max_tokens": 40, "temperature": 0.8, "seed": number, "ignore_eos": True, **params}
    return GenerateRequest(
        id=f"r{number}", params=SamplingParams(**given), prompt=f"Chapter {number}. " + "words " * (number % 7)
    )


async def read(
    client: EngineClient, wanted: GenerateRequest, give_up_after: int | None = None, begun: set[str] | None = None
) -> list[list[int]] | None:
    """The tokens of every sample, or None if it was given up. `begun` is told as soon as there are some."""
    samples: list[list[int]] = [[] for _ in range(wanted.params.n)]
    stream = await client.submit(wanted)
    try:
        async for event in stream:
            samples[event.index] += event.token_ids
            if begun is not None:
                begun.add(wanted.id)
            if give_up_after is not None and len(samples[0]) >= give_up_after:
                return None
    finally:
        await stream.aclose()
    return samples


async def condition(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.002)


def test_streams_survive_a_killed_engine(tiny_model: Path) -> None:
    requests = [request(number, n=1 + number % 3 // 2) for number in range(64)]
    llm = LLM(tiny_model)
    undisturbed = [[output.token_ids for output in llm.generate(r.prompt or "", r.params)[0].outputs] for r in requests]
    chance = random.Random(1)
    cancelled = {number: chance.randrange(1, 20) for number in range(64) if chance.random() < 0.25}

    expected = [None if number in cancelled else undisturbed[number] for number in range(64)]

    def one(client: EngineClient, number: int, begun: set[str]) -> Coroutine[Any, Any, list[list[int]] | None]:
        return read(client, requests[number], cancelled.get(number), begun)

    run(check_that_a_kill_loses_nothing(EngineOptions(model=str(tiny_model)), one, expected, num_begun=21))


def test_cancelling_frees_the_engine(tiny_model: Path) -> None:
    class Watch:
        held = -1

        def step(self, record: Any) -> None:
            self.held = record.scheduler.held_blocks

        def rests(self, scheduler: Any) -> None:
            self.held = scheduler.held_blocks

        def tokens(self, gaps: list[TokenGap]) -> None: ...

        def request(self, record: Any) -> None: ...

        def restarted(self, num_retried: int, num_charged: int) -> None: ...

    async def main() -> None:
        watch = Watch()
        async with EngineClient(EngineOptions(model=str(tiny_model)), watch) as client:
            long = [await client.submit(request(number, max_tokens=450)) for number in range(4)]
            for stream in long:
                async for _ in stream:
                    break
                await stream.aclose()
            await read(client, request(99, max_tokens=2))
            assert watch.held == 0

    run(main())


def test_refusals_come_before_anything_is_streamed(tiny_model: Path) -> None:
    async def main() -> None:
        options = EngineOptions(model=str(tiny_model), max_num_seqs=2, max_queued_requests=1)
        async with EngineClient(options) as client:
            with pytest.raises(BadRequest, match="context holds 512"):
                await client.submit(request(1, max_tokens=512))
            streams = [await client.submit(request(number)) for number in range(3)]
            with pytest.raises(QueueFull):
                await client.submit(request(4))
            with pytest.raises((BadRequest, QueueFull)):
                await client.submit(request(0))
            draining = asyncio.create_task(client.drain())
            for stream in streams:
                assert [event async for event in stream][-1].final
            await draining
            with pytest.raises(Unavailable):
                await client.submit(request(5))

    run(main())


def test_a_request_that_is_tokenized_when_draining_begins_is_answered(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            long = replace(request(1), prompt="words " * LONG_TEXT, truncate_prompt_tokens=8)
            submitting = asyncio.create_task(client.submit(long))
            await asyncio.sleep(0)
            client.state = "draining"
            stream = await submitting
            assert [event async for event in stream][-1].final

    run(main())


def test_a_request_that_was_there_whenever_an_engine_was_killed_goes_on(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            victim = await client.submit(request(1, max_tokens=480))
            events, num_tokens = victim.__aiter__(), 0
            for _ in range(4):
                num_tokens += len((await anext(events)).token_ids)
                pid = client.engine_pid
                os.kill(pid, signal.SIGKILL)
                await condition(lambda pid=pid: client.engine_pid != pid)
            assert num_tokens + sum([len(event.token_ids) async for event in events]) == 480

    run(main())


def test_a_request_that_cannot_be_written_ends_alone(tiny_model: Path) -> None:
    def unwritable(number: int) -> GenerateRequest:
        asked = request(number, max_tokens=480)
        asked.priority = 2**70
        return asked

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            with pytest.raises(OverflowError):
                await client.submit(unwritable(1))
            assert not client.busy
            other = asyncio.create_task(read(client, request(2, max_tokens=200)))
            pid = client.engine_pid
            os.kill(pid, signal.SIGKILL)
            await condition(lambda: client.state == "restarting")
            late = await client.submit(unwritable(3))  # goes to the engine with all the others
            with pytest.raises(EngineFailed, match="cannot be given to the engine"):
                async for _ in late:
                    pass
            assert await other is not None and client.state == "ready"

    run(main())


def test_a_failure_of_the_server_leaves_nobody_waiting(tiny_model: Path) -> None:
    class Broken:
        def step(self, record: Any) -> None:
            raise RuntimeError("a mistake")

        def request(self, record: Any) -> None: ...

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model)), Broken()) as client:  # type: ignore[arg-type]
            with pytest.raises(EngineFailed, match="the server failed"):
                await read(client, request(1))
            with pytest.raises(Unavailable):
                await client.submit(request(2))

    run(main())


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)

    async def main() -> None:
        with pytest.raises(BadCheckpoint, match=r"broken\.gguf"):
            async with EngineClient(EngineOptions(model=str(broken))):
                pass

    run(main())


def test_async_engine_yields_growing_outputs_and_aborts(tiny_model: Path) -> None:
    async def main() -> None:
        engine = AsyncEngine(str(tiny_model))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        lengths = []
        async for output in engine.generate("A quire is", params, request_id="a"):
            lengths.append(len(output.outputs[0].token_ids))
        assert lengths[-1] == 12 and lengths == sorted(lengths) and output.finished

        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        last = None
        async for output in engine.generate("A quire is", endless, request_id="b"):
            await engine.abort("b")
            last = output
        assert last and last.outputs[0].finish_reason == "cancelled"
        await engine.shutdown()

    run(main())


def test_reset_prefix_cache_makes_the_next_prompt_a_miss(tiny_model: Path) -> None:
    async def cached(client: EngineClient, number: int) -> int:
        wanted = request(number, max_tokens=2)
        wanted.prompt, wanted.prompt_ids = "The paper of the book " * 6, None
        return max([event.num_cached_tokens async for event in await client.submit(wanted)])

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            assert await cached(client, 1) == 0 and await cached(client, 2) > 0
            assert await client.reset_prefix_cache("another tenant") is True and await cached(client, 3) > 0
            assert await client.reset_prefix_cache() is True
            assert await cached(client, 4) == 0

    run(main())


def test_resets_are_answered_when_the_engine_dies(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            os.kill(client.engine_pid, signal.SIGSTOP)
            asked = asyncio.ensure_future(client.reset_prefix_cache())
            await asyncio.sleep(0)
            os.kill(client.engine_pid, signal.SIGKILL)
            assert await asyncio.wait_for(asked, 30) is True

    run(main())

"""Ranks that are killed at random while they compute 64 streams: every answer is the one of an undisturbed engine.

`make trials` kills 200 ranks of the default model (QUIRE_TRIAL_LENGTH=2: 40), and `make test` one of a tiny one. How
long it took to recover is printed: `QUIRE_TRIAL_LENGTH=10 pytest -s -m trial tests/ranks/test_faults.py`."""

import asyncio
import os
import random
import signal
import time
from itertools import count
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.engine.options import EngineOptions
from ranks.processes import exists, followers, wait_until
from trials import LENGTH

NUM_STREAMS = 64
NUM_KILLS = 1 if LENGTH == 1 else 20 * LENGTH
RANKS = 2
MAX_RECOVERY = 2.0  # seconds from a kill to the next token, in a trial, whose machine is idle
MAX_TOKENS = 24


class Streams:
    """Requests that follow each other in 64 streams, until all kills are done."""

    def __init__(self, client: EngineClient, expected: list[list[int]]) -> None:
        self._client, self._expected = client, expected
        self._numbers = count()
        self.stopping = False
        self.num_tokens = self.num_answers = 0

    async def run(self, index: int) -> None:
        while not self.stopping:
            request = GenerateRequest(id=f"r{next(self._numbers)}", params=params(index), prompt=prompt(index))
            tokens: list[int] = []
            async for event in await self._client.submit(request):
                tokens += event.token_ids
                self.num_tokens += len(event.token_ids)
            assert tokens == self._expected[index], f"stream {index}"
            self.num_answers += 1


def prompt(index: int) -> str:
    return f"Chapter {index}. It was " + "a dark " * (index % 5)


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)


async def kill_at_random(client: EngineClient, streams: Streams, draw: random.Random) -> dict[str, list[float]]:
    """-> seconds from each kill to the next token, of the engine's process, which is rank 0, and of other ranks"""
    recoveries: dict[str, list[float]] = {"rank 0": [], "rank 1": []}
    for number in range(1, NUM_KILLS + 1):
        before = streams.num_tokens
        while streams.num_tokens < before + NUM_STREAMS:  # it has recovered, and all gain
            await asyncio.sleep(0.005)
        await asyncio.sleep(draw.uniform(0, 0.3))
        engine = client.engine_pid
        victim = draw.choice([engine, *followers(engine)])
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        while client.engine_pid == engine or client.state != "ready":
            await asyncio.sleep(0.005)
        seen = streams.num_tokens
        while streams.num_tokens == seen:
            await asyncio.sleep(0.005)
        recoveries["rank 0" if victim == engine else "rank 1"].append(time.monotonic() - began)
        if number % 20 == 0 or number == NUM_KILLS:
            told = [f"{name}: {seconds(each)}" for name, each in recoveries.items() if each]
            print(f"{number} kills, {streams.num_answers} answers; {'; '.join(told)}", flush=True)
    return recoveries


def seconds(recoveries: list[float]) -> str:
    ordered = sorted(recoveries)
    half, nine_tenths = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9))
    return f"{len(ordered)} times {half:.2f} s (median), {nine_tenths:.2f} s (90 %), {ordered[-1]:.2f} s (longest)"


@pytest.mark.trial
@pytest.mark.timeout(0)
def test_answers_are_those_of_an_undisturbed_engine(request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue("tiny_model" if LENGTH == 1 else "default_model")
    options = {"max_model_len": 256, "max_num_seqs": NUM_STREAMS}
    numbers = range(NUM_STREAMS)
    llm = LLM(model, **options)
    results = llm.generate([prompt(index) for index in numbers], [params(index) for index in numbers])
    llm.engine.stop()
    expected = [result.outputs[0].token_ids for result in results]

    async def main() -> tuple[dict[str, list[float]], int]:
        given = EngineOptions.of({"model": str(model), "tensor_parallel_size": RANKS, **options})
        async with EngineClient(given) as client:
            streams = Streams(client, expected)
            reading = [asyncio.create_task(streams.run(index)) for index in numbers]
            killing = asyncio.create_task(kill_at_random(client, streams, random.Random(LENGTH)))
            done, _ = await asyncio.wait([*reading, killing], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {killing}:
                task.result()  # raises: no stream ends before
            streams.stopping = True
            recoveries = await killing
            await asyncio.gather(*reading)
            last = [client.engine_pid, *followers(client.engine_pid)]
        wait_until(lambda: not any(exists(process) for process in last))
        return recoveries, streams.num_answers

    recoveries, num_answers = asyncio.run(main())
    assert num_answers >= NUM_STREAMS
    everything = [each for of_one in recoveries.values() for each in of_one]
    print(f"{num_answers} answers equal; recovery {seconds(everything)}")
    if LENGTH > 1:
        assert max(everything) <= MAX_RECOVERY

"""Engines that die in the middle of what they do: every answer is the one of an undisturbed engine."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from quire.client.engine_client import EngineClient
from quire.engine.options import EngineOptions
from quire.server.observe.metrics import ModelMetrics

Read = Callable[[EngineClient, int, set[Any]], Awaitable[Any]]
Victim = Callable[[int], int]  # of an engine's process, the one that is killed


def the_engine(process: int) -> int:
    return process


async def check_that_a_kill_loses_nothing(
    options: EngineOptions, read: Read, expected: list[Any], num_begun: int
) -> None:
    """`read` gives the answer of a number, and adds to the set when some of it has come. The engine is killed when
    `num_begun` have."""
    metrics = ModelMetrics()
    async with EngineClient(options, metrics) as client:
        await kill_in_the_middle(client, metrics, read, expected, num_begun)


async def kill_in_the_middle(
    client: EngineClient,
    metrics: ModelMetrics,
    read: Read,
    expected: list[Any],
    num_begun: int,
    victim: Victim = the_engine,
) -> None:
    """Once more where the engine has told all before it is killed, as it may on a busy machine."""
    while not metrics.retried:
        begun: set[Any] = set()
        tasks = [asyncio.ensure_future(read(client, number, begun)) for number in range(len(expected))]
        while len(begun) < num_begun:
            await asyncio.sleep(0.002)
        await kill(client, victim)
        assert await asyncio.gather(*tasks) == expected


async def kill(client: EngineClient, victim: Victim = the_engine) -> None:
    """Until another engine is there."""
    engine = client.engine_pid
    os.kill(victim(engine), signal.SIGKILL)
    while client.engine_pid == engine or client.state != "ready":
        await asyncio.sleep(0.002)

"""Requests that would come too late are refused early."""

import asyncio
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.forecast import Forecast
from quire.client.generate_request import GenerateRequest
from quire.core.errors import DeadlinePassed, QueueFull
from quire.core.records import SchedulerStats, StepRecord
from quire.engine.options import EngineOptions


def step(num_tokens: int, num_drawn: int, seconds: float, **stats: int) -> StepRecord:
    return StepRecord(
        step=0,
        num_tokens=num_tokens,
        num_drawn=num_drawn,
        schedule_seconds=0.0,
        run_seconds=seconds,
        update_seconds=0.0,
        scheduler=SchedulerStats(**stats),
    )


def test_prompts_wait_for_those_before_them() -> None:
    forecast = Forecast(max_num_seqs=4)
    assert forecast.wait(10_000, 0) == 0.0, "nothing is known yet"
    for _ in range(10):
        forecast.step(step(500, 1, 1.0))
        forecast.step(step(4, 4, 0.2))  # only decoding: says nothing of prompts
    forecast.add(1000)
    assert forecast.wait(500, 1) == pytest.approx(3.0)
    forecast.begun(1000)
    assert forecast.wait(500, 1) == pytest.approx(1.0)
    forecast.step(step(500, 1, 1.0, prefix_queries=100, prefix_hits=75))
    assert forecast.wait(500, 1) == pytest.approx(0.25), "what is in the cache is not computed"


def test_where_all_rows_are_taken_others_have_to_end() -> None:
    forecast = Forecast(max_num_seqs=2)
    forecast.step(step(500, 1, 0.0001))
    for number in range(100):
        forecast.ended(now=number * 2.0, num_left=2)
    assert forecast.wait(1, 1) < 0.001
    assert forecast.wait(1, 4) == pytest.approx(6.0, rel=0.01)


def test_the_refusal_says_when_to_come_back() -> None:
    forecast = Forecast(max_num_seqs=2)
    forecast.step(step(100, 1, 1.0))
    forecast.add(1000)
    forecast.check(0, 0, None, None)
    forecast.check(0, 0, 20.0, 11.0)
    with pytest.raises(QueueFull, match=r"about 10.0 s, and 4.0 s are allowed") as refused:
        forecast.check(0, 0, 20.0, 4.0)
    assert refused.value.retry_after == 6


def test_a_burst_right_after_the_start_is_measured_by_its_first(tiny_model: Path) -> None:
    async def main() -> None:
        options = EngineOptions(model=str(tiny_model), max_wait=1e-6, enable_prefix_caching=False)
        async with EngineClient(options) as client:

            async def asked(number: int) -> str:
                params = SamplingParams(max_tokens=2, ignore_eos=True)
                request = GenerateRequest(id=f"r{number}", params=params, prompt="words " * 60)
                try:
                    return [event async for event in await client.submit(request)][-1].finish_reason or ""
                except QueueFull:
                    return "refused"

            ends = await asyncio.gather(*map(asked, range(20)))
            assert ends == ["length"] + ["refused"] * 19

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_that_is_behind_refuses_at_once(tiny_model: Path) -> None:
    def request(number: int, timeout: float | None = None) -> GenerateRequest:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        return GenerateRequest(id=f"r{number}", params=params, prompt="words " * 60, timeout=timeout)

    async def main() -> None:
        options = EngineOptions(model=str(tiny_model), max_wait=1000.0, enable_prefix_caching=False)
        async with EngineClient(options) as client:
            late = await client.submit(request(9, timeout=0.001))  # nothing was measured yet
            with pytest.raises(DeadlinePassed, match="the deadline of the request has passed"):
                async for _ in late:
                    pass
            first = await client.submit(request(0))
            assert [event async for event in first][-1].final
            with pytest.raises(QueueFull, match="the first token would take about"):
                await client.submit(request(1, timeout=1e-6))
            assert client._requests.forecast.wait(0, 0) == 0.0, "nobody waits, so nothing is counted"

    asyncio.run(asyncio.wait_for(main(), 60))

"""Limits and budgets that gateways share, on a real Redis, also when it is away."""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from gateway.gateways import answers, gateway, upstreams, wait_for
from gateway.redis_server import RedisServer, needs_redis
from quire.core.errors import QuireError
from quire.gateway import shared_limits
from quire.gateway.config import GatewayKey, Redis
from quire.gateway.config_file import parse_config
from quire.gateway.ledger import UNIT, OverBudget
from quire.gateway.redis_client import RedisAway, RedisClient
from quire.gateway.shared_limits import LimitsAway, SharedLimits
from quire.gateway.tenants import Tenant, Tenants
from quire.server.errors import OverQuota

pytestmark = needs_redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_answers_come_to_who_asked(redis: RedisServer) -> None:
    async def work() -> None:
        client = RedisClient(redis.url, 5.0)
        assert await client.call("SET", "a", b"1\r\n2") == b"OK"
        asked = [client.call("INCRBY", f"n{number}", number) for number in range(50)]
        assert await asyncio.gather(*asked) == list(range(50))
        assert await client.call("GET", "a") == b"1\r\n2" and await client.call("GET", "none") is None
        with pytest.raises(RedisAway, match="ERR"):
            await client.call("NONSENSE")
        assert await client.call("EVAL", "return {1, 'x', {2}}", 0) == [1, b"x", [2]]
        await client.close()

    run(work())


def test_a_password_is_given_and_a_wrong_one_is_an_error(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", "secret")

    async def work() -> None:
        right = RedisClient(server.url.replace("//", "//:secret@"), 5.0)
        assert await right.call("PING") == b"PONG"
        await right.close()
        wrong = RedisClient(server.url.replace("//", "//:guessed@"), 5.0)
        with pytest.raises(RedisAway, match=r"WRONGPASS|invalid"):
            await wrong.call("PING")
        await wrong.close()

    run(work())
    server.stop()


def test_a_server_that_stops_or_is_silent_is_away_and_comes_back(redis: RedisServer) -> None:
    async def work() -> None:
        client = RedisClient(redis.url, 0.2, retry_seconds=0.0)
        await client.call("PING")
        redis.freeze()
        with pytest.raises(RedisAway):
            await client.call("PING")
        redis.thaw()
        assert await client.call("PING") == b"PONG"
        redis.stop()
        with pytest.raises(RedisAway):
            await client.call("PING")
        redis.start()
        assert await client.call("PING") == b"PONG"
        await client.close()

    run(work())


# -- limits of three gateways


def tenant_of(**limits: Any) -> Tenant:
    [tenant] = Tenants([GatewayKey(name="alice", key="k", **limits)]).all()
    return tenant


class Fleet:
    """Gateways that share a Redis, each with a tenant of its own that stands for the same key."""

    def __init__(self, redis: RedisServer, count: int = 3, when_away: str = "local", **limits: Any) -> None:
        settings = Redis(url=redis.url, when_away=when_away, timeout=2.0)  # type: ignore[arg-type]
        self.limits = [SharedLimits(settings) for _ in range(count)]
        self.tenants = [tenant_of(**limits) for _ in range(count)]

    async def enter(self, gateway: int, amount: int = 0, num: int = 1) -> bool:
        return await self.limits[gateway].enter(self.tenants[gateway], num, amount)

    def settle(self, gateway: int, reserved: int = 0, spent: int = 0, tokens: int = 0, num: int = 1) -> None:
        self.limits[gateway].settle(self.tenants[gateway], num, reserved, spent, tokens, True)

    async def told(self) -> None:
        for limits in self.limits:
            while limits._owed or len(limits._tasks) > 1:
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        for limits in self.limits:
            await limits.close()


def test_a_budget_is_overrun_by_one_request_at_most(redis: RedisServer) -> None:
    """Three gateways, requests at the same time, whatever each reserves and takes."""

    async def work() -> None:
        rng = random.Random(7)
        fleet = Fleet(redis, monthly_budget=50 / UNIT)
        spent = held = num_refused = 0

        async def request(gateway: int) -> None:
            nonlocal spent, held, num_refused
            amount = rng.randint(1, 9)
            try:
                await fleet.enter(gateway, amount)
            except OverBudget as error:
                num_refused += 1
                assert error.retry_after >= 1
                return
            held += amount
            await asyncio.sleep(rng.random() * 0.004)
            held -= amount
            took = rng.randint(0, amount)
            spent += took
            fleet.settle(gateway, amount, took)

        for _ in range(20):
            await asyncio.gather(*(request(number % 3) for number in range(9)))
            await fleet.told()
        assert 50 <= spent + held < 50 + 9 and num_refused
        assert [tenant.budget.spent for tenant in fleet.tenants] == [pytest.approx(spent, abs=9)] * 3
        await fleet.close()

    run(work())


def test_requests_tokens_and_concurrency_are_counted_together(redis: RedisServer) -> None:
    async def work() -> None:
        fleet = Fleet(redis, requests_per_minute=6, max_concurrency=4)
        for number in (0, 1, 2, 0):
            assert await fleet.enter(number)
        with pytest.raises(OverQuota, match="4 requests in flight, and may have 4"):
            await fleet.enter(1)
        fleet.settle(0)
        await fleet.told()
        assert await fleet.enter(1) and fleet.tenants[1].quota.running == 4
        for number in (0, 1, 2):
            fleet.settle(number)
        await fleet.told()
        assert await fleet.enter(2)
        with pytest.raises(OverQuota, match="6 requests a minute") as refused:
            await fleet.enter(0)
        assert refused.value.retry_after >= 1
        assert fleet.tenants[0].quota.headers()["x-ratelimit-remaining-requests"] == "0"
        await fleet.close()
        other = Fleet(redis, count=2, tokens_per_minute=100)
        await other.enter(0)
        other.settle(0, tokens=150)
        await other.told()
        with pytest.raises(OverQuota, match="100 tokens a minute"):
            await other.enter(1)
        await other.close()

    run(work())


def test_a_dead_gateway_holds_nothing_for_long(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests in flight count until it has been silent for a while; those of a living one count on."""
    monkeypatch.setattr(shared_limits, "TELL_SECONDS", 0.1)

    async def work() -> None:
        fleet = Fleet(redis, max_concurrency=2)
        await fleet.enter(0)
        await fleet.enter(1)
        for task in fleet.limits[0]._tasks:
            task.cancel()  # no sign of life any more
        with pytest.raises(OverQuota):
            await fleet.enter(2)
        await asyncio.sleep(1.3)
        monkeypatch.setattr(shared_limits, "SILENT_SECONDS", 1.0)
        for expected in (nullcontext(), pytest.raises(OverQuota)):
            await fleet.limits[1]._run(fleet.tenants[1], "look", shared_limits.Owed())  # as it does all the time
            with expected:
                await fleet.enter(2)
        await fleet.close()

    run(work())


def test_a_limit_that_is_changed_forgets_nothing_that_was_used(redis: RedisServer) -> None:
    """A new limit began full, so a change of the file gave every key its day again."""

    async def work() -> None:
        fleet = Fleet(redis, count=1, tokens_per_day=1000)
        await fleet.enter(0)
        fleet.settle(0, tokens=1100)
        await fleet.told()
        await fleet.close()
        for limit, is_open in ((1050, False), (1200, True)):
            later = Fleet(redis, count=1, tokens_per_day=limit)
            if is_open:
                assert await later.enter(0)
                later.settle(0)
                await later.told()
            else:
                with pytest.raises(OverQuota):
                    await later.enter(0)
            await later.close()

    run(work())


def test_a_clock_behind_at_the_end_of_a_month_brings_no_second_budget(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway whose clock was behind went back to the old month, and each change of month forgot what was spent."""
    months = iter([])

    async def work() -> None:
        nonlocal months
        fleet = Fleet(redis, count=2, monthly_budget=10 / UNIT)
        monkeypatch.setattr(shared_limits, "period_label", lambda *_: next(months))
        months = iter(["2026-09", "2026-09"])
        await fleet.enter(0)
        fleet.settle(0, spent=9)
        await fleet.told()
        months = iter(["2026-10", "2026-10", "2026-09", "2026-09", "2026-10", "2026-09"])
        await fleet.enter(0)  # the month begins, with all of the budget
        fleet.settle(0, spent=8)
        await fleet.told()
        await fleet.enter(1)
        fleet.settle(1, spent=4)
        await fleet.told()
        for number in (0, 1):
            with pytest.raises(OverBudget):
                await fleet.enter(number)
        await fleet.close()

    run(work())


def test_without_redis_each_gateway_counts_for_itself_and_tells_later(redis: RedisServer) -> None:
    async def work() -> None:
        fleet = Fleet(redis, count=2, monthly_budget=100 / UNIT)
        await fleet.enter(0, 10)
        redis.stop()
        assert await fleet.enter(1, 30) is False
        fleet.limits[1].settle(fleet.tenants[1], 1, 30, 60, 5, False)
        assert await fleet.enter(1, 30) is False, "60 of 100 are spent, as far as it knows"
        with pytest.raises(OverBudget):
            await fleet.enter(1, 30), await fleet.enter(1, 30)
        assert fleet.limits[1].is_away
        redis.start()
        fleet.limits[1]._redis._retry_at = 0.0
        await fleet.limits[1]._tell(fleet.tenants[1])
        fleet.limits[0]._redis._retry_at = 0.0
        await fleet.enter(0, 1)
        assert fleet.tenants[0].budget.spent == 60
        await fleet.close()

    run(work())


def test_or_every_request_is_refused(redis: RedisServer) -> None:
    async def work() -> None:
        fleet = Fleet(redis, count=1, when_away="refuse", requests_per_minute=100)
        await fleet.enter(0)
        redis.stop()
        with pytest.raises(LimitsAway) as refused:
            await fleet.enter(0)
        assert refused.value.status == 503
        await fleet.close()

    run(work())


def test_three_gateways_keep_a_budget(redis: RedisServer, tmp_path: Path) -> None:
    """As processes, with requests through all of them at once. One costs 0.000012; the budget is that of 25."""
    with ExitStack() as stack:
        [upstream] = stack.enter_context(upstreams(answers(prompt=4, output=8)))
        config = f"""
[redis]
url = "{redis.url}"
[[workers]]
url = "{upstream.url}"
[models.m]
price = {{prompt = 1.0, output = 1.0}}
[[keys]]
name = "alice"
key = "secret"
monthly_budget = {25 * 12 / 1e6}
"""
        gateways = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            gateways.append(stack.enter_context(gateway(config, folder=folder)))
        headers = {"authorization": "Bearer secret"}

        def ask(number: int) -> int:
            return gateways[number % 3].chat(max_tokens=8, headers=headers).status_code

        with ThreadPoolExecutor(6) as pool:
            statuses = list(pool.map(ask, range(120)))
        for _ in range(3):  # what was reserved and not taken
            statuses += [ask(number) for number in range(6)]
        assert set(statuses) == {200, 429}
        assert 25 <= statuses.count(200) <= 26
        wait_for(lambda: gateways[0].chat(max_tokens=8, headers=headers).json()["error"]["code"] == "budget_exceeded")
        redis.stop()
        assert ask(1) == 429, "it goes on from what it knows"


def test_the_url_is_checked() -> None:
    with pytest.raises(QuireError, match="no address of Redis"):
        parse_config(b'[redis]\nurl = "http://x"\n', "c")
    with pytest.raises(QuireError) as refused:
        parse_config(b'[redis]\nurl = "redis://user:hidden@x/nine"\n', "c")
    assert "hidden" not in str(refused.value)

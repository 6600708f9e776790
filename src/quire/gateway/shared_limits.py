"""Limits and budgets that several gateways share, in Redis: every decision is one script there.

Each answer is taken over into the gateway's own quota and budget. While Redis is away these go on from there, or every
request is refused, as the configuration says; what was spent meanwhile is told to Redis when it is back."""

import asyncio
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import QuireError
from quire.gateway.config import Redis
from quire.gateway.ledger import month_of
from quire.gateway.redis_client import RedisAway, RedisClient
from quire.gateway.tenants import Tenant
from quire.server.errors import OverQuota

log = logging.getLogger("quire.gateway")

SCRIPT = Path(__file__).with_name("shared_limits.lua").read_bytes()
SILENT_SECONDS = 30.0  # after which a gateway that has requests in flight counts as dead
TELL_SECONDS = 5.0  # between two signs of life


class LimitsAway(QuireError):
    status, code = 503, "limits_unavailable"
    retry_after = 2


@dataclass(slots=True)
class Owed:
    """What Redis has not been told yet, of one tenant."""

    num: int = 0
    reserved: int = 0
    tokens: int = 0
    spent: int = 0


class SharedLimits:
    def __init__(self, settings: Redis) -> None:
        self._settings = settings
        self._redis = RedisClient(settings.url, settings.timeout)
        self._gateway = os.urandom(8).hex()
        self._digest = hashlib.sha1(SCRIPT).hexdigest()  # Redis names scripts so
        self._owed: dict[Tenant, Owed] = {}
        self._in_flight: dict[Tenant, int] = {}  # requests that Redis knows of
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_away = False
        self._start(self._stay_alive())

    async def enter(self, tenant: Tenant, num: int, amount: int) -> bool:
        """Charge a request to its tenant, or raise why it may not begin. -> whether Redis knows of it"""
        try:
            admitted = await self._run(tenant, "enter", Owed(num, amount))
        except RedisAway as error:
            self._note_away(str(error))
            if self._settings.when_away == "refuse":
                raise LimitsAway("the limits of keys cannot be read now", "try again in a moment") from None
            _enter_alone(tenant, num, amount)
            return False
        if admitted:
            self._in_flight[tenant] = self._in_flight.get(tenant, 0) + 1
            return True
        _enter_alone(tenant, num, amount)  # raises, with what was taken over from Redis
        _leave_alone(tenant, num, amount)
        raise OverQuota(f"key `{tenant.name}` is at a limit that gateways share", wait=1.0)

    def settle(self, tenant: Tenant, num: int, reserved: int, spent: int, tokens: int, in_redis: bool) -> None:
        """A request has ended. `in_redis`: what `enter` returned."""
        tenant.quota.running -= num
        tenant.quota.charge(tokens)
        tenant.budget.settle(reserved, spent)
        owed = self._owed.setdefault(tenant, Owed())
        owed.tokens += tokens
        owed.spent += spent
        if in_redis:
            owed.num += num
            owed.reserved += reserved
            self._in_flight[tenant] -= 1
        self._start(self._tell(tenant))

    async def _tell(self, tenant: Tenant) -> None:
        """Tell Redis what is owed. If it is away, that stays owed."""
        if (owed := self._owed.pop(tenant, None)) is None:
            return
        try:
            await self._run(tenant, "settle", owed)
        except RedisAway as error:
            self._note_away(str(error))
            more = self._owed.setdefault(tenant, Owed())
            more.num, more.reserved = more.num + owed.num, more.reserved + owed.reserved
            more.tokens, more.spent = more.tokens + owed.tokens, more.spent + owed.spent

    async def _stay_alive(self) -> None:
        """Pay what is owed, and let Redis know that requests in flight are not those of a dead gateway."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            for tenant in list(self._owed):
                await self._tell(tenant)
            for tenant in [tenant for tenant, count in self._in_flight.items() if count]:
                try:
                    await self._run(tenant, "look", Owed())
                except RedisAway as error:
                    self._note_away(str(error))
                    break

    async def _run(self, tenant: Tenant, operation: str, owed: Owed) -> bool:
        limits, budget = tenant.quota.limits, tenant.budget.limit
        given = (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.max_concurrency)
        bounds = [-1 if limit is None else limit for limit in (*given, budget)]
        year, month = month_of(time.time())
        keys = [f"{self._settings.prefix}{{{tenant.name}}}:{part}" for part in ("state", "in_flight")]
        words: list[str | int] = [2, *keys, operation, self._gateway, owed.num, owed.reserved, f"{year}-{month:02}"]
        words += [*bounds, str(SILENT_SECONDS), owed.tokens, owed.spent]
        try:
            answer = await self._redis.call("EVALSHA", self._digest, *words)
        except RedisAway as error:
            if "NOSCRIPT" not in str(error):
                raise
            answer = await self._redis.call("EVAL", SCRIPT, *words)
        self._note_away("")
        admitted, running, *levels, spent, reserved = answer
        tenant.quota.adopt(int(running), [float(level) for level in levels])
        tenant.budget.adopt(int(spent), int(reserved))
        return bool(admitted)

    def _note_away(self, why: str) -> None:
        """Empty: it is there."""
        if bool(why) == self.is_away:
            return
        self.is_away = bool(why)
        how = "requests are refused" if self._settings.when_away == "refuse" else "this gateway counts for itself"
        if why:
            log.error("Redis is away (%s): %s", why, how)
        else:
            log.info("Redis is back: limits are shared again")

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for tenant in list(self._owed):
            await self._tell(tenant)
        for task in self._tasks:
            task.cancel()
        await self._redis.close()


def _enter_alone(tenant: Tenant, num: int, amount: int) -> None:
    """As one gateway does it, with what it knows."""
    tenant.quota.check_concurrency(num, num)
    tenant.quota.enter()
    tenant.quota.running += num - 1
    try:
        tenant.budget.reserve(amount)
    except QuireError:
        tenant.quota.running -= num
        raise


def _leave_alone(tenant: Tenant, num: int, amount: int) -> None:
    tenant.quota.running -= num
    tenant.budget.settle(amount, 0)

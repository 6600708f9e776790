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
from quire.gateway.accounts import Account
from quire.gateway.budget_periods import period_label
from quire.gateway.config import Redis
from quire.gateway.redis_client import RedisAway, RedisClient
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
    """Use of one account that Redis has not been told yet."""

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
        self._owed: dict[Account, Owed] = {}
        self._in_flight: dict[Account, int] = {}  # requests that Redis knows of
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_away = False
        self._start(self._stay_alive())

    async def enter(self, account: Account, num: int, amount: int) -> bool:
        """Charge a request to its account, or raise why it may not begin. -> whether Redis knows of it"""
        try:
            admitted = await self._run(account, "enter", Owed(num, amount))
        except RedisAway as error:
            self._note_away(str(error))
            if self._settings.when_away == "refuse":
                raise LimitsAway("the limits of keys cannot be read now", "try again in a moment") from None
            account.enter(num, amount)
            return False
        if admitted:
            self._in_flight[account] = self._in_flight.get(account, 0) + 1
            return True
        account.enter(num, amount)  # raises, with what was taken over from Redis
        account.leave(num, amount, 0, 0)
        raise OverQuota(f"key `{account.name}` is at a limit that gateways share", wait=1.0)

    def settle(self, account: Account, num: int, reserved: int, spent: int, tokens: int, in_redis: bool) -> None:
        """A request has ended. `in_redis`: what `enter` returned."""
        account.leave(num, reserved, spent, tokens)
        owed = self._owed.setdefault(account, Owed())
        owed.tokens += tokens
        owed.spent += spent
        if in_redis:
            owed.num += num
            owed.reserved += reserved
            self._in_flight[account] -= 1
        self._start(self._tell(account))

    async def _tell(self, account: Account) -> None:
        """Tell Redis what is owed. If it is away, that stays owed."""
        if (owed := self._owed.pop(account, None)) is None:
            return
        try:
            await self._run(account, "settle", owed)
        except RedisAway as error:
            self._note_away(str(error))
            more = self._owed.setdefault(account, Owed())
            more.num, more.reserved = more.num + owed.num, more.reserved + owed.reserved
            more.tokens, more.spent = more.tokens + owed.tokens, more.spent + owed.spent

    async def _stay_alive(self) -> None:
        """Pay what is owed, and let Redis know that requests in flight are not those of a dead gateway."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            for account in list(self._owed):
                await self._tell(account)
            for account in [account for account, count in self._in_flight.items() if count]:
                try:
                    await self._run(account, "look", Owed())
                except RedisAway as error:
                    self._note_away(str(error))
                    break

    async def _run(self, account: Account, operation: str, owed: Owed) -> bool:
        limits, budget = account.quota.limits, account.budget.limit
        given = (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.max_concurrency)
        bounds = [-1 if limit is None else limit for limit in (*given, budget)]
        keys = [f"{self._settings.prefix}{{{account.name}}}:{part}" for part in ("state", "in_flight")]
        period = period_label(account.budget.period, time.time())
        words: list[str | int] = [2, *keys, operation, self._gateway, owed.num, owed.reserved, period]
        words += [*bounds, str(SILENT_SECONDS), owed.tokens, owed.spent]
        try:
            answer = await self._redis.call("EVALSHA", self._digest, *words)
        except RedisAway as error:
            if "NOSCRIPT" not in str(error):
                raise
            answer = await self._redis.call("EVAL", SCRIPT, *words)
        self._note_away("")
        admitted, running, *levels, spent, reserved = answer
        account.quota.adopt(int(running), [float(level) for level in levels])
        account.budget.adopt(int(spent), int(reserved))
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
        for account in list(self._owed):
            await self._tell(account)
        for task in self._tasks:
            task.cancel()
        await self._redis.close()

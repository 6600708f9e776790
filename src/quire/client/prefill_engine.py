"""A supervised engine process that computes prompts for decode engines.

It has nothing that would be lost: when it dies, the decode engines compute what is missing, and another is started."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from quire.client.cache_resets import CacheResets
from quire.client.engine_process import EngineLink, EngineProcess
from quire.client.service import Observer
from quire.client.watchdog import STALL_SECONDS, Watchdog
from quire.core.errors import QuireError, Unsupported
from quire.core.records import SchedulerStats
from quire.engine.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    Failed,
    FromEngine,
    LoadAdapter,
    PingEngine,
    PrefixCacheReset,
    Ready,
    Start,
    StepDone,
    UnloadAdapter,
)
from quire.engine.options import EngineOptions

log = logging.getLogger("quire.engine")

MAX_FAILURES = 5  # in a row, none of which got as far as being ready
MAX_RESTART_DELAY = 5.0  # seconds
SECONDS_TO_LAST = 10.0  # an engine that was ready for longer is started again at once
CHECK_INTERVAL = 1.0  # seconds between looks at whether it answers


class PrefillEngine:
    """`start`, then `stop`. In between, there is an engine most of the time."""

    def __init__(
        self,
        options: EngineOptions,
        spawn: Callable[[], EngineLink] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`spawn` makes its process."""
        self.options = options
        self.observer: Observer | None = None
        self._spawn = spawn or EngineProcess
        self._engine: EngineLink | None = None
        self._adapters: dict[str, str] = {}  # key -> files, as it should have them
        self._cache_resets = CacheResets(lambda message: self._engine.send(message) if self._engine else None)
        self._is_ready = False
        self._watchdog = Watchdog(lambda: self._is_ready, self._ping, stall_seconds)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @property
    def pid(self) -> int:
        assert self._engine is not None, "not started"
        return self._engine.pid

    async def start(self, path: Path, adapters: Mapping[str, str]) -> None:
        """Returns when it is ready; raises if it cannot be."""
        self._adapters = dict(adapters)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._supervise(path, ready)),
            asyncio.create_task(self._watchdog.run()),
            asyncio.create_task(self._kill_stalled()),
        ]
        try:
            await ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cache_resets.engine_died()

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        """Load and unload LoRA adapters until it has these, by key. Prompts of one that it lacks are not computed."""
        before, self._adapters = self._adapters, dict(adapters)
        if self._engine is not None and self._is_ready:
            for key in adapters.keys() - before.keys():
                self._engine.send(LoadAdapter(key, adapters[key]))
            for key in before.keys() - adapters.keys():
                self._engine.send(UnloadAdapter(key))

    async def reset_prefix_cache(self, tenant: str) -> bool:
        return await self._cache_resets.ask(tenant) if self._is_ready else True

    # -- the process

    async def _supervise(self, path: Path, ready: "asyncio.Future[None]") -> None:
        failures = 0
        while True:
            restarted, adapters, was_ready = ready.done(), dict(self._adapters), 0.0
            self._engine = engine = self._spawn()
            await engine.start(Start(str(path), self.options, adapters, restarted))
            error: QuireError | None = None
            try:
                async for messages in engine.messages():
                    self._watchdog.heard()
                    for message in messages:
                        if isinstance(message, Ready):
                            if message.task != "generate":
                                raise Unsupported("prefill_engines are for models that generate", "leave them out")
                            failures, was_ready, self._is_ready = 0, time.monotonic(), True
                            self._adapters, wanted = adapters, self._adapters
                            self.set_adapters(wanted)
                            if not ready.done():
                                ready.set_result(None)
                        elif isinstance(message, Failed):
                            error = message.error.exception()
                        else:
                            self._receive(message)
            except QuireError as unsupported:
                error = unsupported
            finally:
                self._is_ready = False
                await engine.stop()
            error = error or engine.death()
            self._cache_resets.engine_died()
            if not ready.done():
                ready.set_exception(error)
                return
            lasted = was_ready and time.monotonic() - was_ready > SECONDS_TO_LAST
            failures = 0 if lasted else failures + 1
            if failures > MAX_FAILURES and not engine.was_killed:
                log.error("a prefill engine: %s. It is not started again: prompts are computed elsewhere", error)
                return
            log.error("a prefill engine: %s. It is started again; prompts are computed elsewhere meanwhile", error)
            if self.observer:
                self.observer.restarted(0, 0)
            await asyncio.sleep(min(0.05 * 2 ** min(failures, 9), MAX_RESTART_DELAY) if failures > 1 else 0)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepDone):
            if self.observer and message.record and (transfers := message.record.scheduler.transfers):
                self.observer.rests(SchedulerStats(transfers=replace(transfers, peers=0)))  # decode engines count them
        elif isinstance(message, PrefixCacheReset):
            self._cache_resets.receive(message)
        elif isinstance(message, AdapterLoaded) and message.error is not None:
            log.error("a prefill engine cannot load adapter %s: %s", message.key, message.error.message)
        elif isinstance(message, AdapterUnloaded):
            self._adapters.pop(message.key, None)

    def _ping(self) -> None:
        if self._engine is not None:
            self._engine.send(PingEngine())

    async def _kill_stalled(self) -> None:
        """Kill an engine that does not answer. It has nothing to lose, and blocks of decode engines that it might still
        write to are held until it ends."""
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL, self._watchdog.seconds / 4))
            if self._is_ready and self._engine is not None and self._watchdog.stalled:
                log.error("a prefill engine has not answered for %.0f s: it is killed", self._watchdog.seconds)
                self._engine.kill()
                self._is_ready = False

"""The workers: from the configuration and from the admin listener; each is checked, drained and removed here."""

import asyncio
import logging
import statistics
from collections.abc import Callable

from quire.core.errors import BadRequest, QuireError
from quire.gateway.config import Faults, WorkerEntry, kv_problems, tls_problem, url_problem
from quire.gateway.kv_fleet import KVFleet
from quire.gateway.loops import LoopDetected
from quire.gateway.resuming import RESUME_HEADER
from quire.gateway.worker import Worker

log = logging.getLogger("quire.gateway")

CONFIGURATION = "configuration"  # a source of workers
CHECKS_PER_MODELS = 5  # the models of a worker are asked for at every fifth check
MIN_WORKERS_TO_EJECT = 3  # of two, nothing tells which is the slow one
NUM_REQUESTS_TO_EJECT = 10
MIN_SLOW_SECONDS = 0.1  # a first byte that comes sooner is never too slow


class UnknownWorker(QuireError):
    status, code = 404, "worker_not_found"


class WorkerFleet:
    """`on_change` is called when a worker may take requests that it could not take before; `on_reset` when its caches
    are empty. `events` is told of workers that come and go."""

    def __init__(
        self,
        faults: Faults,
        on_change: Callable[[], None],
        on_reset: Callable[[Worker], None],
        events: KVFleet | None = None,
    ) -> None:
        self.faults = faults
        self.workers: list[Worker] = []
        self._events = events or KVFleet(0)
        self._on_change, self._on_reset = on_change, on_reset
        self._checks: dict[Worker, asyncio.Task[None]] = {}
        self._known: dict[str, list[WorkerEntry]] = {}  # by source: the configuration, discovery

    def add(self, entry: WorkerEntry) -> Worker:
        if problem := url_problem(entry.url) or tls_problem(entry) or next(kv_problems(entry), ""):
            raise BadRequest(problem, param="url")
        if any(worker.name == entry.label for worker in self.workers):
            raise BadRequest(f"there is a worker {entry.label}", "remove it first, or give another name", param="name")
        taken = {worker.bit for worker in self.workers}
        bit = next(bit for bit in range(len(taken) + 1) if bit not in taken)
        worker = Worker(entry, self.faults, bit)
        self.workers.append(worker)
        self._events.added(worker)
        self._checks[worker] = asyncio.create_task(self._watch(worker))
        log.info("worker %s at %s is added", worker.name, entry.url)
        return worker

    def find(self, name: str) -> Worker:
        for worker in self.workers:
            if worker.name == name:
                return worker
        names = ", ".join(worker.name for worker in self.workers) or "none"
        raise UnknownWorker(f"there is no worker {name}", f"the workers are {names}")

    def drain(self, name: str) -> Worker:
        """Send a worker no new requests; those in flight end."""
        worker = self.find(name)
        worker.draining = True
        log.info("worker %s drains %d requests", worker.name, worker.num_in_flight)
        return worker

    def resume(self, name: str) -> Worker:
        worker = self.find(name)
        worker.draining = False
        self._on_change()
        return worker

    async def remove(self, name: str, timeout: float) -> None:
        """Drain it, wait for its requests as long as allowed, and forget it."""
        worker = self.drain(name)
        await self._wait(worker, timeout)
        self._forget(worker)

    async def _wait(self, worker: Worker, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await worker.drained()
        except TimeoutError:
            log.warning("worker %s still has %d requests in flight", worker.name, worker.num_in_flight)
        worker.pool.close()

    def _forget(self, worker: Worker) -> None:
        if worker in self.workers:
            worker.draining = True
            self.workers.remove(worker)
            self._checks.pop(worker).cancel()
            self._events.removed(worker)
            self._on_reset(worker)
            log.info("worker %s is removed", worker.name)

    def check(self, source: str, entries: list[WorkerEntry]) -> None:
        """Raises BadRequest where `configure` could not add a worker, as another has its name."""
        old = self._known.get(source, [])
        others = {worker.name: worker for worker in self.workers if worker.entry not in old}
        for entry in entries:
            other = others.get(entry.label)
            if other is not None and not other.can_become(entry):
                message = f"there is a worker {entry.label} at {other.entry.url} already, which was added or found"
                raise BadRequest(message, "remove it first, or give another `name`", param="workers")

    def set_faults(self, faults: Faults) -> None:
        self.faults = faults
        for worker in self.workers:
            worker.configure(faults)

    def configure(self, source: str, entries: list[WorkerEntry], timeout: float) -> list[asyncio.Task[None]]:
        """Add what is new in a source, change what is different and remove what is gone from it; workers of other
        sources and of the admin listener stay. -> what waits for the requests in flight at removed workers"""
        old, self._known[source] = self._known.get(source, []), entries
        self._change(source, entries, old)
        waits, before = [], {}
        for worker in [worker for worker in self.workers if worker.entry in old and worker.entry not in entries]:
            before[worker.name, worker.entry.url] = worker, worker.draining
            self._forget(worker)
            waits.append(asyncio.create_task(self._wait(worker, timeout)))
        for entry in [entry for entry in entries if entry not in old]:
            if any(worker.entry == entry for worker in self.workers):
                continue  # the worker's settings were changed
            if any(worker.name == entry.label for worker in self.workers):
                log.warning("worker %s was found, and there is one of that name", entry.label)
                continue
            added = self.add(entry)
            if (known := before.get((added.name, entry.url))) is not None:
                added.take_over(*known)
        self._on_change()
        return waits

    def _change(self, source: str, entries: list[WorkerEntry], old: list[WorkerEntry]) -> None:
        """Workers whose new entry takes effect at once keep all that is known of them."""
        for entry in entries:
            for worker in self.workers:
                is_own = worker.entry in old or source == CONFIGURATION
                if is_own and worker.entry not in entries and worker.can_become(entry):
                    worker.become(entry)
                    log.info("worker %s is changed", worker.name)

    async def first_checks(self) -> None:
        """Returns when every worker was asked once."""
        while any(not worker.checked for worker in self.workers):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        for worker in self.workers:
            worker.pool.close()

    # -- health

    async def _watch(self, worker: Worker) -> None:
        number = 0
        while True:
            try:
                await self._check(worker, number % CHECKS_PER_MODELS == 0)
            except Exception:
                log.exception("worker %s could not be checked", worker.name)
            number += 1
            self._eject_outliers()
            await asyncio.sleep(self.faults.health_interval)

    async def _check(self, worker: Worker, with_models: bool) -> None:
        was_healthy, was_ready, old_problem = worker.healthy, worker.ready, worker.problem
        try:
            worker.problem = await self._ask(worker, with_models)
        except (OSError, TimeoutError) as error:
            worker.healthy = worker.ready = False
            worker.problem = _unreachable(error, self.faults.connect_timeout)
        first, worker.checked = not worker.checked, True
        if worker.ready != was_ready or worker.problem != old_problem or first:
            level = logging.WARNING if worker.problem else logging.INFO
            log.log(level, "worker %s is %s%s", worker.name, worker.state, worker.problem and f": {worker.problem}")
        if was_healthy and not worker.healthy:
            self._events.away(worker)
            self._on_reset(worker)  # whatever comes back there has computed nothing yet
        if worker.healthy and not was_healthy:
            worker.breaker.reset()  # failures were those of the process before, or of the way to it
        if worker.ready:
            self._on_change()

    async def _ask(self, worker: Worker, with_models: bool) -> str:
        """-> what is wrong with it. Raises OSError or TimeoutError."""
        was_ready, timeout = worker.ready, self.faults.connect_timeout
        health = (await worker.get("/health", timeout)).status
        worker.healthy = health < 500
        answer = await worker.get("/ready", timeout)
        worker.ready = worker.healthy and answer.status in (200, 404, 405)  # others have no such path
        worker.resumes = any(name == RESUME_HEADER for name, _ in answer.headers)
        if health == LoopDetected.status:
            return "it leads back to this gateway"
        if not worker.ready:
            path, status = ("/ready", answer.status) if worker.healthy else ("/health", health)
            return f"it answered {status} to {path}"
        if with_models or not was_ready or not worker.cards:
            return await worker.ask_models(timeout)
        return worker.problem

    def _eject_outliers(self) -> None:
        """Open the breaker of a worker whose first bytes come much later than those of the others."""
        known = [
            worker
            for worker in self.workers
            if worker.takes_requests and worker.first_byte is not None and worker.num_requests >= NUM_REQUESTS_TO_EJECT
        ]
        if len(known) < MIN_WORKERS_TO_EJECT:
            return
        usual = statistics.median(worker.first_byte or 0.0 for worker in known)
        slowest = max(known, key=lambda worker: worker.first_byte or 0.0)
        seconds = slowest.first_byte or 0.0
        if seconds > max(self.faults.outlier_ratio * usual, MIN_SLOW_SECONDS):
            log.warning(
                "worker %s is ejected: its first byte takes %.3f s, the median %.3f s", slowest.name, seconds, usual
            )
            slowest.breaker.eject()
            slowest.first_byte = None


def _unreachable(error: OSError | TimeoutError, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it does not answer within {timeout:g} s"
    return f"it cannot be reached ({error.strerror or error})"

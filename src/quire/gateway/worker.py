"""One worker as the gateway sees it: where it is, what it serves, how it is, and what it has in flight."""

import asyncio
import logging
from typing import Any, Literal

import msgspec

from quire.gateway.breaker import CircuitBreaker
from quire.gateway.config import Faults, WorkerEntry, tls_context
from quire.gateway.loops import via
from quire.gateway.upstream import ConnectionPool
from quire.gateway.wire import ClientRequest, Headers, request_head

log = logging.getLogger("quire.gateway")

MAX_ANSWER_BYTES = 4 << 20  # of a health check or a list of models
SLOWNESS_DECAY = 0.1  # weight of the newest time to the first byte in the running mean

WorkerState = Literal["starting", "ready", "not_ready", "unhealthy", "draining"]


class Worker:
    """`bit` is its place in sets of workers."""

    def __init__(self, entry: WorkerEntry, faults: Faults, bit: int) -> None:
        loop = asyncio.get_running_loop()
        self.entry, self.name, self.bit, self.mask = entry, entry.label, bit, 1 << bit
        self.pool = ConnectionPool(entry.url, faults.connect_timeout, tls_context(entry), entry.tls_name)
        self.breaker = CircuitBreaker(faults.breaker_failures, faults.breaker_seconds, loop.time)
        secret = entry.secret.encode()
        # Headers for the gateway's own key at this worker.
        self.credentials: Headers = [(b"authorization", b"Bearer " + secret), (b"x-api-key", b"")] if secret else []
        self.healthy = False
        self.ready = False
        self.checked = False
        self.problem = ""  # what the last check has found
        self.draining = False
        self.is_quire = False
        self.resumes = False  # whether it takes over streams of other workers, and lets others take over its own
        self.cards: dict[str, dict[str, Any]] = {name: {"id": name} for name in entry.models or ()}  # by model
        self.num_in_flight = 0
        self.tokens_in_flight = 0
        self.load = self.token_load = 0.0  # both by the worker's weight
        self.num_catching_up = 0  # streams of other workers that it is to go on with, and has added nothing to
        self.num_requests = 0
        self.num_failures = 0
        self.first_byte: float | None = None  # a running mean, in seconds
        self._drained = asyncio.Event()
        self._drained.set()

    def configure(self, faults: Faults) -> None:
        self.pool.connect_timeout = faults.connect_timeout
        self.breaker.configure(faults.breaker_failures, faults.breaker_seconds)

    def can_become(self, entry: WorkerEntry) -> bool:
        """Whether only what takes effect at once is different."""
        own = self.entry
        same = msgspec.structs.replace(
            entry, name=own.name, weight=own.weight, max_in_flight=own.max_in_flight, models=own.models
        )
        return own == same and self.name == entry.label

    def become(self, entry: WorkerEntry) -> None:
        self.entry = entry
        self._take(0, 0)
        if entry.models is not None:
            self.cards = {name: self.cards.get(name, {"id": name}) for name in entry.models}

    def take_over(self, other: "Worker", draining: bool) -> None:
        """Take over the health of `other`, the same server under other settings. It is as healthy as it was, until it
        is asked again."""
        self.healthy, self.ready, self.checked = other.healthy, other.ready, other.checked
        self.is_quire, self.resumes = other.is_quire, other.resumes
        self.draining = draining
        if self.entry.models is None:
            self.cards = other.cards

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return "draining"
        if not self.checked:
            return "starting"
        return "ready" if self.ready else "not_ready" if self.healthy else "unhealthy"

    @property
    def takes_requests(self) -> bool:
        return self.ready and not self.draining and self.breaker.allows

    @property
    def has_room(self) -> bool:
        return self.num_in_flight < self.entry.max_in_flight

    def begin(self, tokens: int) -> None:
        self.num_requests += 1
        if not self.num_in_flight:
            self._drained.clear()
        self._take(1, tokens)
        self.breaker.begin()

    def _take(self, num: int, tokens: int) -> None:
        self.num_in_flight += num
        self.tokens_in_flight += tokens
        self.load, self.token_load = self.num_in_flight / self.entry.weight, self.tokens_in_flight / self.entry.weight

    def end(self, tokens: int) -> None:
        self._take(-1, -tokens)
        if self.num_in_flight == 0:
            self._drained.set()

    def answered(self, seconds: float) -> None:
        """The time to its first byte."""
        last = seconds if self.first_byte is None else self.first_byte
        self.first_byte = last + SLOWNESS_DECAY * (seconds - last)

    def ended(self, is_failure: bool) -> None:
        """A request was answered, or not."""
        if is_failure:
            self.failed()
        else:
            self.breaker.succeeded()

    def failed(self) -> None:
        self.num_failures += 1
        num_opened = self.breaker.num_opened
        self.breaker.failed()
        if self.breaker.num_opened > num_opened:
            log.warning("worker %s fails: nothing is sent to it for a while", self.name)

    async def drained(self) -> None:
        """Returns when nothing is in flight."""
        await self._drained.wait()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.entry.url,
            "state": self.state,
            "problem": self.problem,
            "breaker": self.breaker.state,
            "models": sorted(self.cards),
            "quire": self.is_quire,
            "weight": self.entry.weight,
            "in_flight": self.num_in_flight,
            "tokens_in_flight": self.tokens_in_flight,
            "max_in_flight": self.entry.max_in_flight,
            "requests": self.num_requests,
            "failures": self.num_failures,
        }

    async def get(self, path: str, timeout: float) -> "WorkerAnswer":
        """GET `path`. Raises OSError or TimeoutError."""
        request = ClientRequest("GET", path.encode(), path, [])
        own = {b"via": via(request), **dict(self.credentials)}
        head = request_head(request, self.pool.host, self.pool.prefix, 0, own)
        async with asyncio.timeout(timeout):
            while True:
                connection = self.pool.take() or await self.pool.connect()
                answer = WorkerAnswer()
                connection.send(head, b"", answer)
                try:
                    await answer.done
                    return answer
                except _Stale:
                    continue
                except asyncio.CancelledError:
                    connection.cancel()
                    raise

    async def ask_models(self, timeout: float) -> str:
        """What it serves, unless the configuration says. -> what is wrong with its answer"""
        answer = await self.get("/v1/models", timeout)
        if answer.status in (401, 403):
            return f"it answered {answer.status} to /v1/models: give this worker its `api_key`"
        if answer.status != 200:
            return f"it answered {answer.status} to /v1/models"
        try:
            cards = msgspec.json.decode(answer.body, type=_ModelCards).data
        except msgspec.MsgspecError:
            return "its answer to /v1/models is not that of OpenAI's API"
        named = {str(card["id"]): card for card in cards if "id" in card}
        if self.entry.models is None:
            self.cards = named
        else:
            self.cards = {name: named.get(name, {"id": name}) for name in self.entry.models}
        self.is_quire = any(card.get("owned_by") == "quire" for card in cards)
        return ""


class _ModelCards(msgspec.Struct):
    data: list[dict[str, Any]]


class _Stale(Exception):
    """An idle connection was closed; another one may do."""


class WorkerAnswer:
    """A whole response, once it is `done`. Implements `Sink`."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.headers: Headers = []
        self.body = bytearray()

    def response_began(self, status: int, headers: Headers, length: int | None) -> None:
        self.status, self.headers = status, headers

    def response_data(self, data: bytes) -> None:
        if len(self.body) <= MAX_ANSWER_BYTES:
            self.body += data

    def response_ended(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def upstream_failed(self, reason: str, is_stale: bool) -> None:
        if not self.done.done():
            self.done.set_exception(_Stale() if is_stale else ConnectionError(reason))

"""The engine as a service: text on this side, a supervised process on the other.

Every request's prompt and every token delivered of it are held here. When the engine process dies, another is started
and the requests in flight are submitted again from where they were; their clients see a pause. A request that engines
die of is answered with the reason (`Submissions`)."""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from quire.client.adapters import ClientAdapters
from quire.client.cache_resets import CacheResets
from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.engine_process import EngineLink, EngineProcess
from quire.client.forecast import Forecast
from quire.client.generate_request import GenerateRequest
from quire.client.generation_config import read_generation_config
from quire.client.grammar_check import GrammarCheck
from quire.client.inflight import EncodeFuture, GenerateStream, InFlight
from quire.client.live_client import LiveClient
from quire.client.model_info import model_info
from quire.client.prompt import Prompter
from quire.client.service import ModelInfo, Observer, State, TokenGap
from quire.client.submissions import Submissions, num_crashes
from quire.client.tasks import check_task
from quire.client.watchdog import Watchdog
from quire.core.encode_request import EncodeRequest
from quire.core.errors import BadRequest, DoesNotFit, QueueFull, QuireError, Unavailable
from quire.core.records import SchedulerStats, StepRecord
from quire.core.request import Request
from quire.engine.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    Cancel,
    Encoded,
    EngineIdle,
    Failed,
    FromEngine,
    LiveSnapshot,
    LoadAdapter,
    PingEngine,
    PrefixCacheReset,
    PrepareGrammars,
    Ready,
    RequestRefused,
    Start,
    StepDone,
    ToEngine,
    WatchEngine,
)
from quire.engine.options import EngineOptions
from quire.engine.start import load_tokenizer, tokenizer_path
from quire.hub import resolve_model
from quire.text.chat.template_traits import template_traits
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    pass

log = logging.getLogger("quire.engine")

MAX_RESTARTS = 5  # in a row, none of which got as far as being ready, or was killed from outside
NUM_QUICK_RESTARTS = 3  # in a row without any output; then each waits longer than the one before
MAX_RESTART_DELAY = 5.0  # seconds
MAX_DELAY_AFTER_KILL = 0.5  # seconds: it is nothing that the engine does wrong


class EngineClient:
    """Implements `Service`. An async context manager, or `start` and `stop`."""

    def __init__(
        self,
        options: EngineOptions,
        observer: Observer | None = None,
        process: EngineProcess | None = None,
        spawn: Callable[[], EngineLink] | None = None,
    ) -> None:
        """`process`: the one to use first, spawned before. `spawn` makes the others."""
        self.options = options
        self.observer = observer
        self.adapters = ClientAdapters(options, self._send_adapter_message)
        self._requests: dict[str, InFlight] = {}
        self._changed: dict[str, InFlight] = {}  # whose consumers have not been told yet
        self._submissions = Submissions(self._requests, self.adapters.engine_ready)
        self._forecast = Forecast(options.max_num_seqs)
        self.tokens_in_flight = 0  # of prompts and texts
        self._stepped = asyncio.Event()  # a step was measured, or a request has ended
        self._idle = asyncio.Event()  # no request is in flight
        self._idle.set()
        self._state: State = "starting"
        self._watchdog = Watchdog(lambda: bool(self._requests), lambda: self._engine.send(PingEngine()))
        self.info: ModelInfo
        self.tokenizer: Tokenizer
        self._engine: EngineLink
        self._spawned, self._spawn = process, spawn or EngineProcess
        self.on_death: Callable[[], None] = _nothing  # requests may go to another engine now
        self.on_step: Callable[[SchedulerStats], None] = _nothing_of
        self.scheduler = SchedulerStats()  # after the last step
        self._num_fruitless = 0  # engines that died in a row without any output
        self._live_clients: set[LiveClient] = set()
        self._cache_resets = CacheResets(lambda message: self._engine.send(message))
        self._ready: asyncio.Future[Ready] | None = None
        self._supervisor: asyncio.Task[Any] | None = None
        self._grammar_check: GrammarCheck | None = None

    @property
    def state(self) -> State:
        return "stalled" if self._state == "ready" and self._watchdog.stalled else self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    # -- starting and stopping

    async def __aenter__(self) -> "EngineClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Find the model, start an engine, and return when it is ready; raise if it cannot be."""
        files = await asyncio.to_thread(resolve_model, self.options.model, revision=self.options.revision)
        await self.adapters.find_given()
        self._start = Start(str(files.path), self.options)
        self._ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        self._watching = asyncio.create_task(self._watchdog.run())
        try:
            generation = read_generation_config(self.options, files.path)
            self.tokenizer = await asyncio.to_thread(load_tokenizer, files.path, self.options)
            await asyncio.to_thread(template_traits, self.tokenizer.chat_template or "")  # takes 0.1 s the first time
            await asyncio.wait((self._ready, self._supervisor), return_when=asyncio.FIRST_COMPLETED)
            ready = self._ready.result() if self._ready.done() else self._supervisor.result()
        except BaseException:
            await self.stop()
            raise
        capacity = ready.capacity
        self._prompter = Prompter(
            self.tokenizer,
            capacity.vocab_size,
            capacity.max_model_len,
            self.options.seed,
            capacity.seq2seq,
            self.options.structured_defaults,
            generation.max_tokens,
        )
        if ready.task == "generate":
            self._grammar_check = GrammarCheck(tokenizer_path(files.path, self.options), capacity.vocab_size)
        else:
            from quire.client.encode_service import new_encode_service

            self._encoder = await asyncio.to_thread(
                new_encode_service, files.path, self.tokenizer, ready, self._encode, self.options.task
            )
        self.info = model_info(self.options, files.name, files.path, ready, generation)

    async def stop(self) -> None:
        self.state = "stopped"
        for live_client in self._live_clients:
            live_client.end()
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        self._watching.cancel()
        await asyncio.gather(self._supervisor, self._watching, return_exceptions=True)
        self.adapters.engine_died(Unavailable("the server is shutting down"))
        self._cache_resets.engine_died()
        if self._grammar_check is not None:
            await self._grammar_check.stop()
        for request in list(self._requests.values()):
            request.fail("the server is shutting down", "cancelled")

    async def drain(self) -> None:
        self.state = "draining"
        await self._idle.wait()

    # -- requests

    async def prepare(self, request: GenerateRequest) -> Request:
        """Render and tokenize, for `submit` of this engine or another of the same model."""
        return await self._prompter.prepare_off_loop(request)

    async def submit(self, request: GenerateRequest, prepared: Request | None = None) -> GenerateStream:
        check_task(self.info, "generate")
        self._check_open()
        prepared = prepared or await self._prompter.prepare_off_loop(request)
        await self._check_wait(len(prepared.prompt_ids), request.timeout)
        structured = prepared.params.structured
        if structured is not None and not structured.is_plain_json:  # any JSON object: known to compile
            assert self._grammar_check is not None, "not started"
            if not self._grammar_check.started and self.state == "ready":  # both take a second: at the same time
                self._engine.send(PrepareGrammars())
            await self._grammar_check.check(structured)
        prepared.adapter = self.adapters.key(request.adapter)  # last: it may have been unloaded meanwhile
        stream = GenerateStream(prepared, self.tokenizer, self)
        for tokens in request.delivered:
            stream.replay(tokens)
        if not stream.finished:
            self._begin(stream)
        return stream

    async def embed(self, request: EmbedRequest) -> Embeddings:
        check_task(self.info, "embed")
        self._check_open()
        return await self._encoder.embed(request)

    async def score(self, request: ScoreRequest) -> Scores:
        check_task(self.info, "embed", "score")
        self._check_open()
        return await self._encoder.score(request)

    async def _encode(self, request: EncodeRequest, timeout: float | None) -> list["array[float]"]:
        request.deadline = None if timeout is None else time.monotonic() + timeout
        await self._check_wait(request.num_tokens, timeout)
        future = EncodeFuture(request, self)
        self._begin(future)
        try:
            return await future.results()
        finally:
            future.owner.cancel(future)

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        check_task(self.info, "generate")
        return await self._cache_resets.ask(tenant) if self.state == "ready" else True  # a new engine has no cache

    def cancel(self, request: InFlight) -> None:
        """End a request and free what it holds. One that has ended is no error."""
        if not request.finished:
            request.fail("it was cancelled", "cancelled")
            self._engine.send(Cancel(request.id, None))

    def _check_open(self) -> None:
        if self.state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down", "ask another one")
        limit = self.options.max_num_seqs + self.options.max_queued_requests
        if len(self._requests) >= limit:
            raise QueueFull(
                f"{len(self._requests)} requests are in flight, and {limit} are allowed",
                "try again later",
                retry_after=1,
            )

    async def _check_wait(self, num_tokens: int, timeout: float | None) -> None:
        """Refuse what would come too late. Until a step has been measured, requests with a time limit are let in one by
        one: the first of a burst shows how long the others would take."""
        max_wait = self.options.max_wait
        if timeout is not None or max_wait is not None:
            while not self._forecast.known and any(request.waiting for request in self._requests.values()):
                self._stepped.clear()
                await self._stepped.wait()
            self._check_open()
        self._forecast.check(num_tokens, len(self._requests), max_wait, timeout)

    def _begin(self, request: InFlight) -> None:
        if request.id in self._requests:
            raise BadRequest(f"a request with id {request.id} is in flight", "give each request an id of its own")
        self._requests[request.id] = request
        self.tokens_in_flight += request.num_prompt_tokens
        if request.waiting:
            self._forecast.add(request.num_prompt_tokens)
        self._idle.clear()
        try:
            self._submissions.add(request)
        except BaseException:  # the caller is told why; no later engine must hear of it
            self.request_ended(request)
            raise

    # -- requests that go from one engine to another

    @property
    def in_flight(self) -> Mapping[str, InFlight]:
        """By id, in the order they came."""
        return self._requests

    def release(self, request: InFlight) -> None:
        """Another engine goes on with it."""
        self.request_ended(request)
        if self.state == "ready":
            request.left.add(self._engine)
            self._engine.send(Cancel(request.id, None))

    def has_left(self, request: InFlight) -> bool:
        """Whether it was taken from this engine process, whose messages of then could be taken for those of now."""
        return self._engine in request.left

    def adopt(self, request: InFlight) -> None:
        """Go on with a request that another engine had."""
        request.owner = self
        self._begin(request)

    # -- what requests in flight say

    def request_started(self, request: InFlight) -> None:
        request.waiting = False
        self._forecast.begun(request.num_prompt_tokens)

    def request_ended(self, request: InFlight) -> None:
        """It has ended, or left for another engine."""
        if self._requests.pop(request.id, None) is None:
            return
        self.tokens_in_flight -= request.num_prompt_tokens
        if request.waiting:
            self._forecast.begun(request.num_prompt_tokens)
        self._forecast.ended(time.monotonic(), len(self._requests))
        self._stepped.set()
        if self.observer and request.record:
            self.observer.request(request.record)
        self._submissions.ended(request)
        if not self._requests:
            self._idle.set()

    # -- watching

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    def kill_engine(self) -> None:
        """One that does not answer: another is started."""
        self._engine.kill()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[LiveClient]:
        """Look at the engine. It makes snapshots only while it is watched."""
        live_client = LiveClient()
        self._live_clients.add(live_client)
        try:
            self._engine.send(WatchEngine(True))  # also if others watch already: this one has not seen anything
            yield live_client
        finally:
            self._live_clients.remove(live_client)
            if not self._live_clients:
                self._engine.send(WatchEngine(False))

    # -- the engine process

    async def _supervise(self) -> None:
        """Keep an engine running until this task is cancelled or it is clear that none can run."""
        failures = 0
        while True:
            restarted = self._ready is None or self._ready.done()
            start = msgspec.structs.replace(self._start, adapters=self.adapters.held, restarted=restarted)
            self._engine, self._spawned = self._spawned or self._spawn(), None
            await self._engine.start(start)
            error: QuireError | None = None
            try:
                async for messages in self._engine.messages():
                    self._watchdog.heard()
                    for message in messages:
                        if isinstance(message, Ready):
                            failures = 0
                            self._engine_ready(message)
                        elif isinstance(message, Failed):
                            error = message.error.exception()
                        else:
                            self._receive(message)
                    self._tell_consumers()
            except Exception:  # our bug: from here on no request would hear of anything
                log.exception("what the engine told could not be passed on")
                self._fail_all("the server failed")
                raise
            finally:
                self._submissions.close()
                await self._engine.stop()
            error = error or self._engine.death()
            failures += not self._engine.was_killed
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(error)  # it never started: `start` raises
                return
            if failures > MAX_RESTARTS or isinstance(error, DoesNotFit):
                log.error("%s: it is not started again", error.message)
                self.adapters.engine_died(error)
                self._cache_resets.engine_died()
                self.on_death()
                self._fail_all(error.message)
                return
            self._engine_died(error)
            self._num_fruitless += 1
            num_waits = max(failures, self._num_fruitless - NUM_QUICK_RESTARTS + 1)
            max_delay = MAX_DELAY_AFTER_KILL if self._engine.was_killed else MAX_RESTART_DELAY
            await asyncio.sleep(min(0.1 * 2 ** min(num_waits, 9), max_delay) if num_waits > 1 else 0)

    def _engine_ready(self, ready: Ready) -> None:
        if self.state != "draining":
            self.state = "ready"
        self._submissions.engine_ready(self._engine.send)
        if self._live_clients:
            self._engine.send(WatchEngine(True))
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(ready)

    def _engine_died(self, error: QuireError) -> None:
        """Requests go on in the next engine, but for the one of which engines die."""
        if self.state != "draining":
            self.state = "restarting"
        self.adapters.engine_died(error)
        num_retried = self._submissions.num_submitted
        culprit = self._submissions.engine_died(self._engine.active_samples(), self._engine.was_killed)
        if culprit is not None:
            reason = f"{error.message}, {num_crashes(culprit)} times while it worked on this request"
            log.error("request %s is given up: %s", culprit.id, reason)
            culprit.fail(reason)
        self.scheduler = SchedulerStats()
        self.on_death()
        log.error("%s: it is started again, and %d requests go on there", error.message, len(self._requests))
        self._cache_resets.engine_died()
        if self.observer:
            num_charged = int(culprit is not None)
            self.observer.restarted(num_retried - num_charged, num_charged)

    def _fail_all(self, reason: str) -> None:
        self.state = "stopped"
        for request in list(self._requests.values()):
            request.fail(reason)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepDone | Encoded):
            if isinstance(message, StepDone) and message.tokens:
                self._num_fruitless = 0
                self._receive_tokens(message.tokens)
            if message.events:
                self._num_fruitless = 0
            if message.record:
                self._record_step(message.record)
            for event in message.events:
                if (request := self._requests.get(event.request_id)) is not None:
                    self._changed[event.request_id] = request
                    if (cancel := request.push(event)) is not None:
                        self._engine.send(cancel)
            self._submissions.update()
        elif isinstance(message, EngineIdle):
            self.scheduler = message.scheduler
            if self.observer:
                self.observer.rests(message.scheduler)
        elif isinstance(message, LiveSnapshot):
            for live_client in self._live_clients:
                live_client.show(message.snapshot)
        elif isinstance(message, AdapterLoaded | AdapterUnloaded):
            self.adapters.receive(message)
        elif isinstance(message, PrefixCacheReset):
            self._cache_resets.receive(message)
        elif isinstance(message, RequestRefused) and (request := self._requests.get(message.request_id)):
            request.refuse(message.error.exception())

    def _receive_tokens(self, tokens: dict[str, list[int]]) -> None:
        """`StepDone.tokens`: all that most streams get of a step, so it has little to do for each."""
        now, gaps = time.monotonic(), list[TokenGap]()
        for request_id, gained in tokens.items():
            request = self._requests.get(request_id)
            if isinstance(request, GenerateStream):
                self._changed[request_id] = request
                if (cancel := request.push_tokens(gained, now, gaps)) is not None:
                    self._engine.send(cancel)
        if self.observer is not None:
            self.observer.tokens(gaps)

    def _tell_consumers(self) -> None:
        """Once for all messages that came together: what a stream gained by them is one write."""
        changed, self._changed = self._changed, {}
        for request in changed.values():
            request.on_ready()

    def _record_step(self, record: StepRecord) -> None:
        self.scheduler = record.scheduler
        self._forecast.step(record)
        self._stepped.set()
        for request_id in record.admitted:
            if isinstance(stream := self._requests.get(request_id), GenerateStream):
                stream.live.admit(time.monotonic() - record.seconds)
        if self.observer:
            self.observer.step(record)
        self.on_step(record.scheduler)

    def _send_adapter_message(self, message: ToEngine) -> None:
        if isinstance(message, LoadAdapter) and self.state != "ready":  # no engine would answer it
            raise Unavailable(f"the engine is {self.state}", "try again in a moment")
        if self._submissions.open or isinstance(message, LoadAdapter):  # requests that wait may need what is unloaded
            self._engine.send(message)


def _nothing() -> None: ...


def _nothing_of(scheduler: SchedulerStats) -> None: ...

"""The engine as a service: text on this side, a supervised process on the other.

Every request's prompt and every token delivered of it are held here. When the engine process dies, another is started
and the requests in flight are submitted again from where they were; their clients see a pause. A request that engines
die of is answered with the reason (`Submissions`)."""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from quire.client.adapters import ClientAdapters
from quire.client.cache_resets import CacheResets
from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.engine_process import EngineLink, EngineProcess
from quire.client.generate_request import GenerateRequest
from quire.client.generation_config import read_generation_config
from quire.client.grammar_check import GrammarCheck
from quire.client.inflight import EncodeFuture, GenerateStream, InFlight
from quire.client.live_client import LiveClient, LiveClients
from quire.client.model_info import model_info
from quire.client.prompt import Prompter
from quire.client.requests_in_flight import RequestsInFlight
from quire.client.restarts import Restarts
from quire.client.service import ModelInfo, Observer, State
from quire.client.submissions import Submissions, num_crashes
from quire.client.tasks import check_task
from quire.client.watchdog import Watchdog
from quire.core.encode_request import EncodeRequest
from quire.core.errors import DoesNotFit, QuireError, Unavailable
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
)
from quire.engine.options import EngineOptions
from quire.engine.start import load_tokenizer, tokenizer_path
from quire.hub import resolve_model
from quire.text.chat.template_traits import template_traits
from quire.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("quire.engine")


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
        self._requests = RequestsInFlight(options, self._send)
        self._submissions = Submissions(self._requests.by_id, self.adapters.engine_ready)
        self._state: State = "starting"
        self._watchdog = Watchdog(lambda: self.busy, lambda: self._send(PingEngine()))
        self.info: ModelInfo
        self.tokenizer: Tokenizer
        self._engine: EngineLink
        self._spawned, self._spawn = process, spawn or EngineProcess
        self._restarts = Restarts()
        self.on_death: Callable[[], None] = _nothing  # requests may go to another engine now
        self.on_step: Callable[[SchedulerStats], None] = _nothing_of
        self.scheduler = SchedulerStats()  # after the last step
        self._live_clients = LiveClients(self._send)
        self._cache_resets = CacheResets(self._send)
        self._ready: asyncio.Future[Ready] | None = None
        self._supervisor: asyncio.Task[Any] | None = None
        self._grammar_check: GrammarCheck | None = None

    def _send(self, message: ToEngine) -> None:
        """To the engine of the moment."""
        self._engine.send(message)

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
        self._live_clients.end()
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        self._watching.cancel()
        await asyncio.gather(self._supervisor, self._watching, return_exceptions=True)
        self.adapters.engine_died(Unavailable("the server is shutting down"))
        self._cache_resets.engine_died()
        if self._grammar_check is not None:
            await self._grammar_check.stop()
        self._requests.fail_all("the server is shutting down", "cancelled")

    async def drain(self) -> None:
        self.state = "draining"
        await self._requests.none_left()

    # -- requests

    async def prepare(self, request: GenerateRequest) -> Request:
        """Render and tokenize, for `submit` of this engine or another of the same model."""
        return await self._prompter.prepare_off_loop(request)

    async def submit(self, request: GenerateRequest, prepared: Request | None = None) -> GenerateStream:
        check_task(self.info, "generate")
        self._check_open()
        prepared = prepared or await self._prompter.prepare_off_loop(request)
        await self._requests.check_wait(len(prepared.prompt_ids), request.timeout, self._check_open)
        structured = prepared.params.structured
        if structured is not None and not structured.is_plain_json:  # any JSON object: known to compile
            assert self._grammar_check is not None, "not started"
            if not self._grammar_check.started and self.state == "ready":  # both take a second: at the same time
                self._send(PrepareGrammars())
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
        await self._requests.check_wait(request.num_tokens, timeout, self._check_open)
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
            self._send(Cancel(request.id, None))

    def _check_open(self) -> None:
        if self.state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down", "ask another one")
        self._requests.check_room()

    def _begin(self, request: InFlight) -> None:
        self._requests.add(request)
        try:
            self._submissions.add(request)
        except BaseException:  # the caller is told why; no later engine must hear of it
            self.request_ended(request)
            raise

    # -- requests that go from one engine to another

    @property
    def in_flight(self) -> Mapping[str, InFlight]:
        """The requests in flight by id, in the order they came."""
        return self._requests.by_id

    def release(self, request: InFlight) -> None:
        """Another engine goes on with it."""
        self.request_ended(request)
        if self.state == "ready":
            request.left.add(self._engine)
            self._send(Cancel(request.id, None))

    def has_left(self, request: InFlight) -> bool:
        """Whether it was taken from this engine process, whose messages of then could be taken for those of now."""
        return self._engine in request.left

    def adopt(self, request: InFlight) -> None:
        """Go on with a request that another engine had."""
        request.owner = self
        self._begin(request)

    # -- what requests in flight say

    def request_started(self, request: InFlight) -> None:
        self._requests.started(request)

    def request_ended(self, request: InFlight) -> None:
        """A request has ended, or left for another engine."""
        if self._requests.remove(request):
            if self.observer and request.record:
                self.observer.request(request.record)
            self._submissions.ended(request)

    # -- watching

    @property
    def busy(self) -> bool:
        return len(self._requests) > 0

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    @property
    def tokens_in_flight(self) -> int:
        """The tokens of all prompts and texts in flight, by which routers compare engines."""
        return self._requests.num_tokens

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    def kill_engine(self) -> None:
        """One that does not answer: another is started."""
        self._engine.kill()

    def watch(self) -> AbstractAsyncContextManager[LiveClient]:
        return self._live_clients.watch()

    # -- the engine process

    async def _supervise(self) -> None:
        """Keep an engine running until this task is cancelled or it is clear that none can run."""
        while True:
            self._engine, self._spawned = self._spawned or self._spawn(), None
            error = await self._run_engine()
            self._restarts.died(self._engine.was_killed)
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(error)  # the engine never started: `start` raises
                return
            if self._restarts.are_too_many or isinstance(error, DoesNotFit):
                log.error("%s: it is not started again", error.message)
                self.adapters.engine_died(error)
                self._cache_resets.engine_died()
                self.on_death()
                self._fail_all(error.message)
                return
            self._engine_died(error)
            await asyncio.sleep(self._restarts.delay)

    async def _run_engine(self) -> QuireError:
        """Start an engine and pass on what it tells. -> what it died of"""
        restarted = self._ready is None or self._ready.done()
        start = msgspec.structs.replace(self._start, adapters=self.adapters.held, restarted=restarted)
        await self._engine.start(start)
        error: QuireError | None = None
        try:
            async for messages in self._engine.messages():
                self._watchdog.heard()
                for message in messages:
                    if isinstance(message, Ready):
                        self._engine_ready(message)
                    elif isinstance(message, Failed):
                        error = message.error.exception()
                    else:
                        self._receive(message)
                self._requests.tell_consumers()
        except Exception:  # our bug: from here on no request would hear of anything
            log.exception("what the engine told could not be passed on")
            self._fail_all("the server failed")
            raise
        finally:
            self._submissions.close()
            await self._engine.stop()
        return error or self._engine.death()

    def _engine_ready(self, ready: Ready) -> None:
        self._restarts.ready()
        if self.state != "draining":
            self.state = "ready"
        self._submissions.engine_ready(self._engine.send)
        self._live_clients.engine_ready()
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
        self._requests.fail_all(reason)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepDone | Encoded):
            if isinstance(message, StepDone) and message.tokens:
                self._receive_tokens(message.tokens)
            if message.events:
                self._restarts.gained_output()
            if message.record:
                self._record_step(message.record)
            for event in message.events:
                request = self._requests.gaining(event.request_id)
                if request is not None and (cancel := request.push(event)) is not None:
                    self._send(cancel)
            self._submissions.update()
        elif isinstance(message, EngineIdle):
            self.scheduler = message.scheduler
            if self.observer:
                self.observer.rests(message.scheduler)
        elif isinstance(message, LiveSnapshot):
            self._live_clients.show(message.snapshot)
        elif isinstance(message, AdapterLoaded | AdapterUnloaded):
            self.adapters.receive(message)
        elif isinstance(message, PrefixCacheReset):
            self._cache_resets.receive(message)
        elif isinstance(message, RequestRefused) and (request := self._requests.by_id.get(message.request_id)):
            request.refuse(message.error.exception())

    def _receive_tokens(self, tokens: dict[str, list[int]]) -> None:
        self._restarts.gained_output()
        gaps = self._requests.push_tokens(tokens)
        if self.observer is not None:
            self.observer.tokens(gaps)

    def _record_step(self, record: StepRecord) -> None:
        self.scheduler = record.scheduler
        self._requests.record_step(record)
        if self.observer:
            self.observer.step(record)
        self.on_step(record.scheduler)

    def _send_adapter_message(self, message: ToEngine) -> None:
        if isinstance(message, LoadAdapter) and self.state != "ready":  # no engine would answer it
            raise Unavailable(f"the engine is {self.state}", "try again in a moment")
        if self._submissions.open or isinstance(message, LoadAdapter):  # requests that wait may need what is unloaded
            self._send(message)


def _nothing() -> None: ...


def _nothing_of(scheduler: SchedulerStats) -> None: ...

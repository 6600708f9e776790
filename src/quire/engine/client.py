"""The engine as a service: text on this side, a supervised process on the other.

Every request's prompt and every token delivered of it are held here. When the engine process dies, another is started
and what was under way is submitted again from where it was; its clients see a pause."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from quire.core.errors import BadRequest, DoesNotFit, EngineFailed, QueueFull, QuireError, Unavailable
from quire.core.request import SequenceEvent
from quire.engine.child import EngineProcess
from quire.engine.generate import GenerateRequest
from quire.engine.grammar_check import GrammarCheck
from quire.engine.live import LiveRequest
from quire.engine.messages import Cancel, Failed, FromEngine, Ready, Refused, Start, Step, Submit
from quire.engine.options import EngineOptions
from quire.engine.prompt import Prompter
from quire.engine.service import ModelInfo, Observer, State
from quire.engine.sources import resolve_model
from quire.engine.start import tokenizer_path
from quire.executors.protocol import Capacity
from quire.text.event import TextEvent
from quire.text.tokenizer import Tokenizer

LONG_TEXT = 20_000  # characters; longer prompts are tokenized in a thread
MAX_CRASHES = 3  # a request that was there each time is given up: it may be the cause
MAX_RESTARTS = 5  # in a row, none of which got as far as being ready


class EngineClient:
    """Implements `Service`. An async context manager, or `start` and `stop`."""

    def __init__(self, options: EngineOptions, observer: Observer | None = None) -> None:
        self.options = options
        self.observer = observer
        self.state: State = "starting"
        self.info: ModelInfo
        self.tokenizer: Tokenizer
        self._live: dict[str, _Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready: asyncio.Future[Capacity] | None = None
        self._supervisor: asyncio.Task[Any] | None = None
        self._grammar_check: GrammarCheck | None = None

    async def __aenter__(self) -> "EngineClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Find the model, start an engine, and return when it is ready; raise if it cannot be."""
        files = await asyncio.to_thread(resolve_model, self.options.model, revision=self.options.revision)
        self._start = Start(str(files.path), self.options)
        self._ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        place = tokenizer_path(files.path, self.options)
        try:
            self.tokenizer = await asyncio.to_thread(Tokenizer.load, place)
            await asyncio.wait((self._ready, self._supervisor), return_when=asyncio.FIRST_COMPLETED)
            capacity = self._ready.result() if self._ready.done() else self._supervisor.result()
        except BaseException:
            await self.stop()
            raise
        self._prompter = Prompter(self.tokenizer, capacity.vocab_size, capacity.max_model_len, self.options.seed)
        self._grammar_check = GrammarCheck(place, capacity.vocab_size)
        self.info = ModelInfo(
            name=self.options.served_model_name or files.name,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            weight_bytes=capacity.weight_bytes,
            cache_bytes=capacity.cache_bytes,
            num_blocks=capacity.num_blocks,
            block_size=self.options.block_size,
        )

    async def stop(self) -> None:
        self.state = "stopped"
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._grammar_check is not None:
            await self._grammar_check.stop()
        for stream in list(self._live.values()):
            stream.end(stream.live.fail("the server is shutting down", "cancelled"))

    async def submit(self, request: GenerateRequest) -> "_Stream":
        if self.state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down", "ask another one")
        limit = self.options.max_num_seqs + self.options.max_queued_requests
        if len(self._live) >= limit:
            raise QueueFull(
                f"{len(self._live)} requests are under way, and {limit} are allowed", "try again later", retry_after=1
            )
        if len(request.prompt or "") + sum(len(str(m)) for m in request.messages or ()) > LONG_TEXT:
            prepared = await asyncio.to_thread(self._prompter.prepare, request)
        else:
            prepared = self._prompter.prepare(request)
        if prepared.params.structured is not None:
            assert self._grammar_check is not None, "not started"
            await self._grammar_check.check(prepared.params.structured)
        if prepared.id in self._live:
            raise BadRequest(f"a request with id {prepared.id} is under way", "give each request an id of its own")
        stream = _Stream(self, LiveRequest(prepared, self.tokenizer))
        self._live[prepared.id] = stream
        self._idle.clear()
        if self.state == "ready":  # else it is sent with all the others, once there is an engine
            await self._engine.send(Submit(prepared))
        return stream

    async def drain(self) -> None:
        self.state = "draining"
        await self._idle.wait()

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    # -- the other side --------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep an engine running until this task is cancelled or it is clear that none can run."""
        failures = 0
        while True:
            self._engine = await EngineProcess.start(self._start)
            problem: QuireError | None = None
            try:
                async for message in self._engine.messages():
                    if isinstance(message, Ready):
                        failures = 0
                        await self._begin(message.capacity)
                    elif isinstance(message, Failed):
                        problem = message.problem.error()
                    else:
                        await self._receive(message)
            finally:
                await self._engine.stop()
            problem = problem or self._engine.death()
            failures += 1
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(problem)  # it never started: whoever waits for it wants to know why
                return
            if failures > MAX_RESTARTS or isinstance(problem, DoesNotFit):
                self.state = "stopped"
                for stream in list(self._live.values()):
                    stream.end(stream.live.fail(problem.message))
                return
            self._mourn(problem)
            await asyncio.sleep(min(0.1 * 2**failures, 5.0) if failures > 1 else 0)

    async def _begin(self, capacity: Capacity) -> None:
        """An engine is ready: give it all that is under way. What comes from now on sends itself."""
        under_way = list(self._live.values())
        if self.state != "draining":
            self.state = "ready"
        for live in (stream.live for stream in under_way if not stream.live.finished):
            await self._engine.send(Submit(live.resumption()))
            for index in live.ended_samples:
                await self._engine.send(Cancel(live.request.id, index))
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(capacity)

    def _mourn(self, problem: QuireError) -> None:
        """The engine died. A request that has seen it too often goes with it."""
        if self.state != "draining":
            self.state = "restarting"
        if self.observer:
            self.observer.restarted()
        for stream in list(self._live.values()):
            stream.live.num_crashes += 1
            if stream.live.num_crashes >= MAX_CRASHES:
                stream.end(stream.live.fail(f"{problem.message}, {MAX_CRASHES} times during this request"))

    async def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            if message.record and self.observer:
                self.observer.step(message.record)
            for event in message.events:
                await self._deliver(event)
        elif isinstance(message, Refused) and (stream := self._live.get(message.request_id)):
            stream.end(message.problem.error())

    async def _deliver(self, event: SequenceEvent) -> None:
        stream = self._live.get(event.request_id)
        text = stream.live.push(event) if stream else None
        if stream is None or text is None:
            return
        if self.observer and event.tokens:
            now = time.monotonic()
            if event.index in stream.last_token:
                self.observer.token(now - stream.last_token[event.index], len(event.tokens))
            stream.last_token[event.index] = now
        if text.final:
            stream.end(text)
        else:
            stream.put(text)
        if text.finish_reason and not event.finish_reason:  # a stop string: the engine would go on
            await self._engine.send(Cancel(event.request_id, event.index))

    def forget(self, stream: "_Stream") -> None:
        """The request has ended, here at least."""
        if self._live.pop(stream.live.request.id, None) and self.observer and stream.live.record:
            self.observer.request(stream.live.record)
        if not self._live:
            self._idle.set()

    async def cancel(self, stream: "_Stream") -> None:
        """End a request and free what it holds. One that has ended is no error."""
        if not stream.live.finished:
            stream.end(stream.live.fail("it was cancelled", "cancelled"))
            await self._engine.send(Cancel(stream.live.request.id, None))


class _Stream:
    """Implements `TextStream`."""

    def __init__(self, client: EngineClient, live: LiveRequest) -> None:
        self.live = live
        self.prompt_ids = live.request.prompt_ids
        self.num_prompt_tokens = len(self.prompt_ids)
        self.last_token: dict[int, float] = {}  # when each sample last gained one
        self._client = client
        self._queue: asyncio.Queue[TextEvent | QuireError] = asyncio.Queue()

    def put(self, event: TextEvent | QuireError) -> None:
        self._queue.put_nowait(event)

    def end(self, event: TextEvent | QuireError) -> None:
        """The last thing it says."""
        if isinstance(event, QuireError):
            self.live.fail(event.message)
        self.put(event)
        self._client.forget(self)

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        while True:
            event = await self._queue.get()
            if isinstance(event, QuireError):
                raise event
            if event.finish_reason == "error":
                raise EngineFailed(event.reason)
            yield event
            if event.final:
                return

    async def aclose(self) -> None:
        await self._client.cancel(self)

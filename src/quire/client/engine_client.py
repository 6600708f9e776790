"""The engine as a service: text on this side, a supervised process on the other.

Every request's prompt and every token delivered of it are held here. When the engine process dies, another is started
and what was under way is submitted again from where it was; its clients see a pause."""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from quire.client.adapters import ClientAdapters
from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores, cosine
from quire.client.engine_process import EngineProcess
from quire.client.forecast import Forecast
from quire.client.generate_request import GenerateRequest
from quire.client.grammar_check import GrammarCheck
from quire.client.inflight import EncodeFuture, GenerateStream, InFlight
from quire.client.live_client import LiveClient
from quire.client.live_request import LiveRequest
from quire.client.prompt import Prompter
from quire.client.service import ModelInfo, Observer, State
from quire.client.spawned import Spawned
from quire.core.encode_request import EncodeEvent, EncodeInput, EncodeRequest, Task
from quire.core.errors import BadRequest, DoesNotFit, QueueFull, QuireError, Unavailable
from quire.core.records import StepRecord
from quire.core.request import SequenceEvent
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
    PrepareGrammars,
    Ready,
    RequestRefused,
    Start,
    StepDone,
    ToEngine,
    WatchEngine,
)
from quire.engine.options import EngineOptions
from quire.engine.start import tokenizer_path
from quire.executors.protocol import Capacity
from quire.hub import resolve_model
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.client.encoder_prompt import EncoderPrompter

T = TypeVar("T")
log = logging.getLogger("quire.engine")

LONG_TEXT = 20_000  # characters; longer prompts are tokenized in a thread
MAX_CRASHES = 3  # a request that was there each time is given up: it may be the cause
MAX_RESTARTS = 5  # in a row, none of which got as far as being ready
MOST_READ_TOKENS = 300_000  # of the texts of one request to be read; OpenAI's limit


class _TaskWords(NamedTuple):
    does: str
    hint: str


TASKS: dict[Task, _TaskWords] = {
    "generate": _TaskWords("continues texts", "serve it with `--task embed`, or name a model that makes vectors"),
    "embed": _TaskWords("makes vectors of texts", "use /v1/embeddings, or name a model that continues texts"),
    "score": _TaskWords("scores pairs of texts", "use /v1/rerank or /v1/score, or name another model"),
}


class EngineClient:
    """Implements `Service`. An async context manager, or `start` and `stop`."""

    def __init__(
        self, options: EngineOptions, observer: Observer | None = None, spawned: Spawned | None = None
    ) -> None:
        """`spawned`: the process to take first."""
        self.options = options
        self._spawned = spawned
        self.observer = observer
        self.state: State = "starting"
        self.info: ModelInfo
        self.tokenizer: Tokenizer
        self.adapters = ClientAdapters(options, self._send)
        self._live: dict[str, InFlight] = {}
        self._forecast = Forecast(options.max_num_seqs)
        self._viewers: set[LiveClient] = set()
        self._stepped = asyncio.Event()  # for those who wait for the next step, or for the end of a request
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready: asyncio.Future[Ready] | None = None
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
        await self.adapters.find_given()
        self._start = Start(str(files.path), self.options)
        self._ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        place = tokenizer_path(files.path, self.options)
        try:
            self.tokenizer = await asyncio.to_thread(Tokenizer.load, place)
            await asyncio.wait((self._ready, self._supervisor), return_when=asyncio.FIRST_COMPLETED)
            ready = self._ready.result() if self._ready.done() else self._supervisor.result()
        except BaseException:
            await self.stop()
            raise
        capacity = ready.capacity
        self._prompter = Prompter(
            self.tokenizer, capacity.vocab_size, capacity.max_model_len, self.options.seed, capacity.seq2seq
        )
        if ready.task == "generate":
            self._grammar_check = GrammarCheck(place, capacity.vocab_size)
        else:
            self._reader = await asyncio.to_thread(self._text_reader, files.path, capacity)
        self.info = ModelInfo(
            name=self.options.served_model_name or files.name,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            weight_bytes=capacity.weight_bytes,
            cache_bytes=capacity.cache_bytes,
            num_blocks=capacity.num_blocks,
            block_size=self.options.block_size,
            task=ready.task,
            dimensions=ready.dimensions,
            path=str(files.path),
        )

    def _text_reader(self, path: Path, capacity: Capacity) -> "EncoderPrompter":
        from quire.client.encoder_prompt import EncoderPrompter
        from quire.weights.sentence_modules import SentenceModules, read_sentence_modules

        modules = read_sentence_modules(path) if path.is_dir() else SentenceModules()
        return EncoderPrompter(self.tokenizer, modules, capacity.vocab_size, capacity.max_model_len)

    async def stop(self) -> None:
        self.state = "stopped"
        for viewer in self._viewers:
            viewer.end()
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self.adapters.engine_died(Unavailable("the server is shutting down"))
        if self._grammar_check is not None:
            await self._grammar_check.stop()
        for one in list(self._live.values()):
            one.give_up("the server is shutting down", "cancelled")

    async def submit(self, request: GenerateRequest) -> GenerateStream:
        self._expect("generate")
        self._admit()
        if len(request.prompt or "") + sum(len(str(m)) for m in request.messages or ()) > LONG_TEXT:
            prepared = await asyncio.to_thread(self._prompter.prepare, request)
        else:
            prepared = self._prompter.prepare(request)
        await self._check_wait(len(prepared.prompt_ids), request.timeout)
        if prepared.params.structured is not None and prepared.params.structured.kind != "json":  # that one is known
            assert self._grammar_check is not None, "not started"
            if not self._grammar_check.started and self.state == "ready":  # both take a second: at the same time
                await self._engine.send(PrepareGrammars())
            await self._grammar_check.check(prepared.params.structured)
        prepared.adapter = self.adapters.key(request.adapter)  # now: it may have been unloaded meanwhile
        stream = GenerateStream(LiveRequest(prepared, self.tokenizer), self._forget, self.cancel)
        await self._begin(stream)
        return stream

    async def embed(self, request: EmbedRequest) -> Embeddings:
        self._expect("embed")
        self._admit()
        self._check_dimensions(request.dimensions)
        texts = await self._tokenized(
            sum(map(len, request.texts)), self._reader.tokens, request.texts, request.prompt_name, request.truncate
        )
        vectors = await self._read(request.id, texts, request.timeout, request.dimensions)
        return Embeddings(vectors, sum(len(text.ids) for text in texts))

    async def score(self, request: ScoreRequest) -> Scores:
        self._expect("embed", "score")
        self._admit()
        size = sum(len(a) + len(b) for a, b in request.pairs)
        if self.info.task == "score":
            texts = await self._tokenized(size, self._reader.pairs, request.pairs, request.truncate)
            scores = [numbers[0] for numbers in await self._read(request.id, texts, request.timeout)]
        else:
            texts, sides = await self._tokenized(size, self._reader.sides, request.pairs, request.truncate)
            vectors = await self._read(request.id, texts, request.timeout)
            scores = [cosine(vectors[a], vectors[b]) for a, b in sides]
        return Scores(scores, sum(len(text.ids) for text in texts))

    async def drain(self) -> None:
        self.state = "draining"
        await self._idle.wait()

    def _expect(self, *tasks: Task) -> None:
        if self.info.task not in tasks:
            what = TASKS[self.info.task]
            raise BadRequest(
                f"`{self.info.name}` {what.does}, and does not {' or '.join(tasks)}", what.hint, param="model"
            )

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and not 0 < dimensions <= self.info.dimensions:
            raise BadRequest(f"dimensions is {dimensions}", f"vectors have {self.info.dimensions}", param="dimensions")

    def _admit(self) -> None:
        if self.state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down", "ask another one")
        limit = self.options.max_num_seqs + self.options.max_queued_requests
        if len(self._live) >= limit:
            raise QueueFull(
                f"{len(self._live)} requests are under way, and {limit} are allowed", "try again later", retry_after=1
            )

    async def _check_wait(self, num_tokens: int, timeout: float | None) -> None:
        """Refuse what would come too late. Until a step has been measured, those who have little time are let in one by
        one: the first of a burst shows how long the others would take."""
        most = self.options.max_wait
        if timeout is not None or most is not None:
            while not self._forecast.known and any(one.waiting for one in self._live.values()):
                self._stepped.clear()
                await self._stepped.wait()
            self._admit()
        self._forecast.check(num_tokens, len(self._live), most, timeout)

    async def _tokenized(self, size: int, encode: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(encode, *arguments) if size > LONG_TEXT else encode(*arguments)

    async def _read(
        self, request_id: str, texts: list[EncodeInput], timeout: float | None, dimensions: int | None = None
    ) -> list["array[float]"]:
        deadline = None if timeout is None else time.monotonic() + timeout
        request = EncodeRequest(id=request_id, texts=texts, dimensions=dimensions, deadline=deadline)
        if request.num_tokens > MOST_READ_TOKENS:
            raise BadRequest(
                f"the texts have {request.num_tokens} tokens, and a request may have {MOST_READ_TOKENS}",
                "send them in several requests",
                param="input",
            )
        if not texts:
            return []
        await self._check_wait(request.num_tokens, timeout)
        reading = EncodeFuture(request, self._forget)
        await self._begin(reading)
        try:
            return await reading.numbers()
        finally:
            await self.cancel(reading)

    async def _begin(self, one: InFlight) -> None:
        if one.id in self._live:
            raise BadRequest(f"a request with id {one.id} is under way", "give each request an id of its own")
        self._live[one.id] = one
        self._forecast.add(one.num_prompt_tokens)
        self._idle.clear()
        if self.state != "ready":  # it is sent with all the others, once there is an engine
            return
        try:
            await self._tell(one)
        except BaseException:  # who asked is told why; others must not hear of it again
            self._forget(one)
            raise

    async def _send(self, message: ToEngine) -> None:
        if isinstance(message, LoadAdapter) and self.state != "ready":  # else nobody would answer it
            raise Unavailable(f"the engine is {self.state}", "try again in a moment")
        await self._engine.send(message)

    async def _tell(self, one: InFlight) -> None:
        for message in one.again():
            await self._engine.send(message)

    @property
    def busy(self) -> bool:
        return bool(self._live)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[LiveClient]:
        """Look at the engine. It makes snapshots only while somebody does."""
        viewer = LiveClient()
        self._viewers.add(viewer)
        try:
            await self._engine.send(WatchEngine(True))  # also if others look already: this one has not seen anything
            yield viewer
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                await self._engine.send(WatchEngine(False))

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    # -- the other side --------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep an engine running until this task is cancelled or it is clear that none can run."""
        failures = 0
        while True:
            restarted = self._ready is None or self._ready.done()
            start = msgspec.structs.replace(self._start, adapters=self.adapters.held, restarted=restarted)
            spawned, self._spawned = self._spawned, None
            self._engine = await EngineProcess.start(start, spawned)
            problem: QuireError | None = None
            try:
                async for message in self._engine.messages():
                    if isinstance(message, Ready):
                        failures = 0
                        await self._engine_ready(message)
                    elif isinstance(message, Failed):
                        problem = message.problem.error()
                    else:
                        await self._receive(message)
            except Exception:  # a mistake of ours: from here on nobody would hear of anything
                log.exception("what the engine told could not be passed on")
                self._give_up_all("the server failed")
                raise
            finally:
                await self._engine.stop()
            problem = problem or self._engine.death()
            failures += 1
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(problem)  # it never started: whoever waits for it wants to know why
                return
            if failures > MAX_RESTARTS or isinstance(problem, DoesNotFit):
                log.error("%s: it is not started again", problem.message)
                self.adapters.engine_died(problem)
                self._give_up_all(problem.message)
                return
            self._mourn(problem)
            await asyncio.sleep(min(0.1 * 2**failures, 5.0) if failures > 1 else 0)

    def _give_up_all(self, why: str) -> None:
        self.state = "stopped"
        for one in list(self._live.values()):
            one.give_up(why)

    async def _engine_ready(self, ready: Ready) -> None:
        """Give it all that is under way. What comes from now on sends itself."""
        under_way = list(self._live.values())
        if self.state != "draining":
            self.state = "ready"
        for one in under_way:
            if one.finished:
                continue
            try:
                await self._tell(one)
            except (OverflowError, TypeError, ValueError):  # it cannot be written: that is nobody else's trouble
                log.exception("request %s cannot be given to an engine", one.id)
                one.give_up("the request cannot be given to the engine")
        await self.adapters.engine_ready()
        if self._viewers:
            await self._engine.send(WatchEngine(True))
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(ready)

    def _mourn(self, problem: QuireError) -> None:
        """The engine died. A request that has seen it too often goes with it."""
        log.error("%s: it is started again, and %d requests go on there", problem.message, len(self._live))
        if self.state != "draining":
            self.state = "restarting"
        self.adapters.engine_died(problem)
        if self.observer:
            self.observer.restarted()
        for one in list(self._live.values()):
            one.num_crashes += 1
            if one.num_crashes >= MAX_CRASHES:
                one.give_up(f"{problem.message}, {MAX_CRASHES} times during this request")

    async def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepDone | Encoded):
            if message.record:
                self._count(message.record)
            for event in message.events:
                await self._deliver(event)
        elif isinstance(message, EngineIdle):
            if self.observer:
                self.observer.rests(message.scheduler)
        elif isinstance(message, LiveSnapshot):
            for viewer in self._viewers:
                viewer.show(message.snapshot)
        elif isinstance(message, AdapterLoaded | AdapterUnloaded):
            self.adapters.receive(message)
        elif isinstance(message, RequestRefused) and (one := self._live.get(message.request_id)):
            one.refuse(message.problem.error())

    def _count(self, record: StepRecord) -> None:
        self._forecast.step(record)
        self._stepped.set()
        for request_id in record.admitted:
            if isinstance(stream := self._live.get(request_id), GenerateStream):
                stream.live.admit(time.monotonic() - record.seconds)
        if self.observer:
            self.observer.step(record)

    async def _deliver(self, event: SequenceEvent | EncodeEvent) -> None:
        one = self._live.get(event.request_id)
        if isinstance(one, EncodeFuture):
            assert isinstance(event, EncodeEvent)
            one.push(event)
        elif isinstance(one, GenerateStream):
            assert isinstance(event, SequenceEvent)
            await self._deliver_text(one, event)

    async def _deliver_text(self, stream: GenerateStream, event: SequenceEvent) -> None:
        text = stream.live.push(event)
        if text is None:
            return
        if event.tokens and stream.waiting:
            self._begun(stream)
        if self.observer and event.tokens:
            now = time.monotonic()
            if event.index in stream.last_token:
                self.observer.token(now - stream.last_token[event.index], len(event.tokens))
            stream.last_token[event.index] = now
        stream.put(text)
        if text.finish_reason and not event.finish_reason:  # a stop string: the engine would go on
            await self._engine.send(Cancel(event.request_id, event.index))

    def _begun(self, one: InFlight) -> None:
        one.waiting = False
        self._forecast.begun(one.num_prompt_tokens)

    def _forget(self, one: InFlight) -> None:
        """The request has ended, here at least."""
        if self._live.pop(one.id, None) is None:
            return
        if one.waiting:
            self._begun(one)
        self._forecast.ended(time.monotonic(), len(self._live))
        self._stepped.set()
        if self.observer and one.record:
            self.observer.request(one.record)
        if not self._live:
            self._idle.set()

    async def cancel(self, one: InFlight) -> None:
        """End a request and free what it holds. One that has ended is no error."""
        if not one.finished:
            one.give_up("it was cancelled", "cancelled")
            await self._engine.send(Cancel(one.id, None))

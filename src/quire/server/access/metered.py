"""The models as one request may use them: checked against its key, within its deadline, charged to its quota."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from quire.client.service import ResolvedModel
from quire.core.errors import DeadlinePassed
from quire.server.access.request_context import RequestContext, current_request_context
from quire.text.event import TextEvent

if TYPE_CHECKING:
    from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
    from quire.client.generate_request import GenerateRequest
    from quire.client.live_client import LiveClient
    from quire.client.service import Models, PullProgress, ServedModel, Service, State, TextStream
    from quire.core.records import RequestRecord

T = TypeVar("T")


class MeteredModels:
    """Implements `Models`. Routes use it and need not know about keys."""

    def __init__(self, models: "Models") -> None:
        self._models = models
        self._streams: set[MeteredStream] = set()  # in flight

    @property
    def state(self) -> "State":
        return self._models.state

    def offers(self) -> list["ServedModel"]:
        context = current_request_context()
        key = context.key if context else None
        return [offer for offer in self._models.offers() if key is None or key.allows(offer.name)]

    async def find(self, name: str | None) -> ResolvedModel:
        context = current_request_context()
        if context is None:
            return await self._models.find(name)
        if context.key is not None and name is not None:
            context.key.check(name)  # before a model is loaded for it
        resolved = await self._in_time(context, self._models.find(name))
        context.model = resolved.adapter or resolved.service.info.name
        if context.key is not None:
            context.key.check(context.model)
        return ResolvedModel(MeteredService(resolved.service, context, self._streams), resolved.adapter)

    async def abort(self, names: Collection[str]) -> set[str]:
        """Cancel the streams in flight of requests with these ids: an HTTP request's, or that of its response. Only
        requests of the caller's own key are cancelled. -> those of the ids that were in flight"""
        context = current_request_context()
        tenant, asked = context.tenant if context else "", set(names)
        aborted: set[str] = set()
        for stream in [stream for stream in self._streams if stream.context.tenant == tenant]:
            if called := stream.names & asked:
                aborted |= called
                stream.context.aborted = True
                await stream.abort()
        return aborted

    @property
    def num_in_flight(self) -> int:
        """Requests that generate."""
        return len({stream.context.id for stream in self._streams})

    @staticmethod
    async def _in_time(context: RequestContext, finding: Coroutine[Any, Any, ResolvedModel]) -> ResolvedModel:
        """The model may have to be loaded first."""
        if context.deadline is None:
            return await finding
        if not context.time_left:
            finding.close()
            raise DeadlinePassed("the deadline of the request has passed", "allow more time")
        try:
            return await asyncio.wait_for(finding, context.time_left)
        except TimeoutError:
            raise DeadlinePassed("the model was not loaded in time", "allow more time, or try again") from None

    async def load_adapter(self, name: str, path: str, in_place: bool = False, base: str | None = None) -> None:
        self._check_name(name)
        await self._models.load_adapter(name, path, in_place, base)

    async def unload_adapter(self, name: str) -> None:
        self._check_name(name)
        await self._models.unload_adapter(name)

    def pull(self, name: str) -> "AsyncGenerator[PullProgress, None]":
        self._check_name(name)
        return self._models.pull(name)

    async def sleep(self) -> None:
        self._check_all()
        await self._models.sleep()

    async def wake_up(self) -> None:
        self._check_all()
        await self._models.wake_up()

    def _check_all(self) -> None:
        """A key changes what all use only if it may use all of it."""
        for offer in self._models.offers():
            self._check_name(offer.name)

    @staticmethod
    def _check_name(name: str) -> None:
        context = current_request_context()
        if context is not None and context.key is not None:
            context.key.check(name)

    async def drain(self) -> None:
        await self._models.drain()


class MeteredService:
    """Implements `Service`."""

    def __init__(self, service: "Service", context: RequestContext, streams: set["MeteredStream"]) -> None:
        self._service, self._context, self._streams = service, context, streams
        self.info, self.tokenizer = service.info, service.tokenizer

    @property
    def state(self) -> "State":
        return self._service.state

    async def submit(self, request: "GenerateRequest") -> "TextStream":
        request.tenant = self._context.tenant
        request.timeout = self._timeout(request.timeout)
        if self._context.key is not None:
            request.weight = self._context.key.weight
        if self._context.key is not None and self._context.key.priority is not None:
            lowered = max(0, request.priority)  # a client may only lower its priority
            request.priority = self._context.key.priority + lowered
        num_sequences = request.params.num_samples
        self._context.hold(num_sequences)
        try:
            stream = await self._in_time(self._service.submit(request))
        except BaseException:
            self._context.release(num_sequences)
            raise
        return MeteredStream(stream, request.id, num_sequences, self._context, self._streams)

    async def embed(self, request: "EmbedRequest") -> "Embeddings":
        request.timeout = self._timeout(request.timeout)
        embeddings = await self._in_time(self._service.embed(request))
        self._context.spend(embeddings.num_tokens, 0)
        return embeddings

    async def score(self, request: "ScoreRequest") -> "Scores":
        request.timeout = self._timeout(request.timeout)
        scores = await self._in_time(self._service.score(request))
        self._context.spend(scores.num_tokens, 0)
        return scores

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        """Clear the prefix cache of the caller's own key only."""
        return await self._service.reset_prefix_cache(self._context.tenant)

    def watch(self) -> "AbstractAsyncContextManager[LiveClient]":
        return self._service.watch()

    async def drain(self) -> None:
        await self._service.drain()

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """The deadline holds also where the engine does not answer."""
        try:
            async with asyncio.timeout(self._context.time_left):
                return await work
        except TimeoutError:
            raise DeadlinePassed("the deadline of the request has passed", "allow more time") from None

    def _timeout(self, asked: float | None) -> float | None:
        """The sooner of the client's and the request's."""
        return min((time for time in (asked, self._context.time_left) if time is not None), default=None)


class MeteredStream:
    """Implements `TextStream`. Events come straight from the stream below; closing it charges the request."""

    def __init__(
        self,
        stream: "TextStream",
        name: str,
        num_sequences: int,
        context: RequestContext,
        streams: set["MeteredStream"],
    ) -> None:
        """`num_sequences`: what the context holds for it."""
        self.context = context
        self._stream, self._name, self._num_sequences, self._streams = stream, name, num_sequences, streams
        self._closed = False
        streams.add(self)
        self.num_prompt_tokens, self.prompt_ids = stream.num_prompt_tokens, stream.prompt_ids
        self.listen, self.take = stream.listen, stream.take

    @property
    def record(self) -> "RequestRecord | None":
        return self._stream.record

    def __aiter__(self) -> AsyncIterator[TextEvent]:
        return self._stream.__aiter__()

    @property
    def names(self) -> set[str]:
        """The id of a request with several prompts is the response's, with a number behind it."""
        return {self.context.id, self._name, self._name.rpartition("-")[0]}

    async def abort(self) -> None:
        """End the stream. Its consumer sees the end and closes it."""
        await self._stream.aclose()

    async def aclose(self) -> None:
        await self._stream.aclose()
        if self._closed:
            return
        self._closed = True
        self._streams.discard(self)
        if (record := self._stream.record) is not None:
            self.context.add(record)
        self.context.release(self._num_sequences)

"""One handler for all dialects. Leaving it, for whatever reason, closes the streams, and that cancels the requests."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest, QuireError
from quire.server.dialects.completion import Completion, CompletionSample, failure
from quire.server.dialects.dialect import Call, Context, Dialect
from quire.server.http.body import read_body
from quire.server.http.event_stream import EventStream, unless_gone
from quire.server.http.replies import error_response, json_response
from quire.server.options import ServerOptions
from quire.text.event import TextEvent

if TYPE_CHECKING:
    from quire.client.service import Models, Service, TextStream

AnyCall = TypeVar("AnyCall", bound=Call)
Endpoint = Callable[[Request], Awaitable[Response]]

PART_BYTES = 1 << 16  # sent at once, at most, if a chunk is not longer
PARSE_INLINE_BYTES = 1 << 16  # larger bodies are parsed in a thread: other streams go on meanwhile


def generation_route(
    models: "Models", dialect: Dialect, parse: Callable[[bytes, Context], Call], options: ServerOptions
) -> Endpoint:
    async def handle(http: Request) -> Response:
        service, call = await understood(http, models, dialect, parse, options)
        return await reply(http, dialect, service, call, options.sse_keep_alive)

    return refusing(dialect, handle)


def refusing(dialect: Dialect, handle: Endpoint) -> Endpoint:
    """With the dialect's own errors."""

    @wraps(handle)
    async def handle_or_refuse(http: Request) -> Response:
        try:
            return await handle(http)
        except QuireError as error:
            return error_response(error, dialect.error, dialect.status)
        except RecursionError:  # deep enough to be decoded, and too deep for the template or the tokenizer
            return error_response(BadRequest("the body is nested too deeply"), dialect.error, dialect.status)

    return handle_or_refuse


async def understood(
    http: Request,
    models: "Models",
    dialect: Dialect,
    parse: Callable[[bytes, Context], AnyCall],
    options: ServerOptions,
) -> tuple["Service", AnyCall]:
    """What the body asks for, and of whom."""
    body = await read_body(http, options.max_body_bytes, dialect.json_only)
    found = await models.find(dialect.model(body))
    service = found.service
    model = found.adapter or service.info.name
    context = Context(service.info, service.tokenizer, http.scope.get("tenant", ""), model, options)
    large = len(body) > PARSE_INLINE_BYTES
    call = await asyncio.to_thread(parse, body, context) if large else parse(body, context)
    for request in call.requests:
        request.adapter = found.adapter
    return service, call


async def reply(http: Request, dialect: Dialect, service: "Service", call: Call, keep_alive: float = 0.0) -> Response:
    """keep_alive: seconds of silence after which a stream is sent a comment; 0: never."""
    if call.stream:
        # Submitted here, so that a refusal has its status; from then on the response owns the streams.
        streams = await _submit(service, call)
        return EventStream(dialect, _framed(dialect, call, streams), keep_alive, lambda: _close(streams))
    return json_response(await unless_gone(http.receive, answered(service, call)))


async def _submit(service: "Service", call: Call) -> list["TextStream"]:
    """All prompts, or none of them."""
    streams: list[TextStream] = []
    try:
        for request in call.requests:
            streams.append(await service.submit(request))
        call.begin([stream.prompt_ids for stream in streams])
    except BaseException:
        await _close(streams)
        raise
    return streams


async def _close(streams: list["TextStream"]) -> None:
    await asyncio.gather(*(stream.aclose() for stream in streams))


async def answered(service: "Service", call: Call) -> object:
    """The whole answer. Being cancelled cancels the requests."""
    streams = await _submit(service, call)
    completions = [
        Completion(stream.prompt_ids, [CompletionSample() for _ in range(request.params.n)])
        for stream, request in zip(streams, call.requests, strict=True)
    ]
    try:
        async with aclosing(_merged(streams)) as events:
            async for prompt, event in events:
                if error := failure(event):
                    raise error
                completions[prompt].add(event)
    finally:
        await _close(streams)
    return call.full(completions)


async def streamed(service: "Service", call: Call) -> None:
    """As `answered`, for a call that itself keeps the chunks it makes."""
    streams = await _submit(service, call)
    try:
        async with aclosing(_told(call, streams)) as told:
            async for _ in told:
                pass
    finally:
        await _close(streams)


async def _told(call: Call, streams: list["TextStream"]) -> AsyncGenerator[list[object], None]:
    """The chunks of a call, event by event."""
    async with aclosing(_merged(streams)) as events:
        async for prompt, event in events:
            if error := failure(event):
                raise error
            yield call.chunks(prompt, event)
    yield call.end()


async def _framed(dialect: Dialect, call: Call, streams: list["TextStream"]) -> AsyncGenerator[bytes, None]:
    """What is there at the same time is sent at once: the further the server is behind, the less a token costs."""
    frame, part = dialect.frame, bytearray()
    try:
        async with aclosing(_told(call, streams)) as told:
            async for chunks in told:
                for chunk in chunks:
                    part += frame(chunk)
                if part and (len(part) >= PART_BYTES or not any(stream.num_ready for stream in streams)):
                    yield bytes(part)
                    part.clear()
    except Exception:
        yield bytes(part)  # what came before it went wrong
        raise
    yield bytes(part) + dialect.last


async def _merged(streams: list["TextStream"]) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """The events of all streams as they come, each with the number of its stream."""
    if len(streams) == 1:  # as nearly always: no queue between the engine and the socket
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, TextEvent | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int) -> None:
        try:
            async for event in streams[number]:
                await queue.put((number, event))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    pumps = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    try:
        running = len(pumps)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

"""The handler that all dialects share: parse a body, submit its requests, write the output.

Leaving a handler, for any reason, closes the streams, and that cancels the requests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.server.access.request_context import current_request_context, current_tenant
from quire.server.access.resumption import RESUME_HEADER, unwrap
from quire.server.app_state import AppState
from quire.server.dialects import reader_of
from quire.server.dialects.call_events import CallFrames, consume
from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Call, Context, Dialect, Parse, Reader
from quire.server.dialects.request_size import MAX_LOGPROBS_OF_ANSWER, check_prompts, num_logprobs
from quire.server.http.body import in_thread_if_large, read_body
from quire.server.http.event_stream import FrameStream, unless_disconnected
from quire.server.http.replies import Endpoint, json_response, with_wire_errors
from quire.server.http.wire_format import WireFormat
from quire.server.options import ServerOptions
from quire.text.event import TextEvent

if TYPE_CHECKING:
    from quire.client.service import Models, Service, TextStream

AnyCall = TypeVar("AnyCall", bound=Call)

INLINE_LOGPROBS = 1 << 12  # an answer with more is written in a thread, so that other streams go on


def generation_route(state: AppState, several: Sequence[Reader]) -> Endpoint:
    """`several`: the dialects that have the path."""
    last = several[-1][0]

    async def handle(http: Request) -> Response:
        body = await read_body(http, state.options.max_body_bytes, last.json_only)
        if RESUME_HEADER in http.headers:
            body = _begin_resumption(body)
        is_shared = len(several) > 1
        dialect, parse = await in_thread_if_large(body, reader_of, body, several) if is_shared else several[0]
        if dialect is last:
            return await answer(http, dialect, parse, body)
        return await with_wire_errors(partial(answer, dialect=dialect, parse=parse, body=body), dialect.wire)(http)

    async def answer(http: Request, dialect: Dialect, parse: Parse, body: bytes) -> Response:
        model = http.path_params.get("model") or await in_thread_if_large(body, dialect.model, body)
        service, call = await parse_call(state.models, state.options, model, body, parse)
        return await respond(http, dialect.wire, service, call, state.options.sse_keep_alive)

    return with_wire_errors(handle, last.wire)


async def parse_call(
    models: "Models",
    options: ServerOptions,
    model: str | None,
    body: bytes,
    parse: Callable[[bytes, Context], AnyCall],
) -> tuple["Service", AnyCall]:
    """Resolve the model, then parse the body for it."""
    resolved = await models.find(model)
    service, adapter = resolved.service, resolved.adapter
    context = Context(service.info, service.tokenizer, current_tenant(), adapter or service.info.name, options)
    call = await in_thread_if_large(body, parse, body, context)
    check_prompts([request.params for request in call.requests], service.info.max_requests)
    for request in call.requests:
        request.adapter = adapter
    _resume(call)
    return service, call


def _begin_resumption(wrapped: bytes) -> bytes:
    """-> the body of the client"""
    context = current_request_context()
    assert context is not None, "a route runs within a request"
    body, context.resumption = unwrap(wrapped)
    return body


def _resume(call: Call) -> None:
    """Let the call go on where its answer was broken off, if it is one that can be resumed."""
    context = current_request_context()
    if context is None or context.resumption is None:
        return
    if not _is_resumable(call):
        if context.resumption.events:
            raise BadRequest("this request cannot be resumed", "it has one completion, without logprobs or mirostat")
        context.resumption = None
        return
    [request] = call.requests
    if request.params.seed is None:
        request.params = replace(request.params, seed=context.resumption.seed)
    request.delivered = context.resumption.events
    request.id += f"-{uuid4().hex[:8]}"  # the same answer may still be in flight here, for a connection that broke


def _is_resumable(call: Call) -> bool:
    """One completion, whose tokens alone decide how it goes on."""
    if not call.stream or len(call.requests) != 1:
        return False
    params = call.requests[0].params
    plain = params.logprobs is None and params.prompt_logprobs is None and not params.mirostat
    return plain and params.num_samples == 1 and not params.beam_width


async def respond(http: Request, wire: WireFormat, service: "Service", call: Call, keep_alive: float) -> Response:
    """`keep_alive`: seconds of silence after which a stream is sent a comment; 0: never."""
    if not call.stream:
        answer = await unless_disconnected(http.receive, complete(service, call))
        return await asyncio.to_thread(json_response, answer) if _asks_much(call) else json_response(answer)
    streams = await _submit(service, call)  # before the response begins, so that a refusal has its HTTP status
    context = current_request_context()
    resumption = context.resumption if context else None
    frames = CallFrames(wire, call, streams, resumption)
    response = FrameStream(wire, frames, keep_alive, close=lambda: _close(streams))
    if resumption is not None:
        response.headers[RESUME_HEADER] = "1"
    return response


async def complete(service: "Service", call: Call) -> object:
    """The response that is not streamed. Cancelling it cancels the requests."""
    streams = await _submit(service, call)
    completions = [
        Completion(stream.prompt_ids, [CompletionSample() for _ in range(request.params.n)])
        for stream, request in zip(streams, call.requests, strict=True)
    ]
    num_held = 0

    def fold(prompt: int, event: TextEvent) -> None:
        nonlocal num_held
        num_held += num_logprobs(event, call.requests[prompt].params.n)
        if num_held > MAX_LOGPROBS_OF_ANSWER:
            raise BadRequest(
                f"the answer has more than {MAX_LOGPROBS_OF_ANSWER} logprobs",
                "stream it, or ask for fewer tokens, completions or alternatives",
                param="logprobs",
            )
        completions[prompt].add(event)

    try:
        await consume(streams, fold)
    finally:
        await _close(streams)
    return await asyncio.to_thread(call.full, completions) if num_held > INLINE_LOGPROBS else call.full(completions)


def _asks_much(call: Call) -> bool:
    """Whether the answer may take long to encode."""
    return any(request.params.logprobs or request.params.prompt_logprobs for request in call.requests)


async def run_stream(service: "Service", call: Call) -> None:
    """Run a call that keeps its chunks itself. Cancelling it cancels the requests."""
    streams = await _submit(service, call)
    try:
        await consume(streams, call.chunks)
        call.end()
    finally:
        await _close(streams)


async def _submit(service: "Service", call: Call) -> list["TextStream"]:
    """All prompts, or none of them."""
    streams: list[TextStream] = []
    try:
        for request in call.requests:
            streams.append(await service.submit(request))
            await asyncio.sleep(0)  # other streams go on between two prompts
        call.begin([stream.prompt_ids for stream in streams])
    except BaseException:
        await _close(streams)
        raise
    return streams


async def _close(streams: list["TextStream"]) -> None:
    for stream in streams:
        await stream.aclose()

"""Runs a batch: requests through the parsers of the OpenAI dialect, results as they finish."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from quire.core.errors import BadRequest, EngineFailed, QueueFull, QuireError
from quire.server.batch.requests import BatchLine, BatchRequest
from quire.server.batch.results import BatchError, BatchReply, BatchResult, result_id
from quire.server.dialects.dialect import Call, Context, model_field
from quire.server.dialects.generate import complete, parse_call
from quire.server.dialects.openai.chat import parse_chat
from quire.server.dialects.openai.completions import parse_completion
from quire.server.dialects.openai.responses.call import ResponseCall, parse_response
from quire.server.dialects.openai.responses.items import InputItem
from quire.server.dialects.openai.responses.shapes import OutputItem
from quire.server.dialects.openai.responses.store import StoredResponse
from quire.server.dialects.openai.shapes import WIRE
from quire.server.http.body import in_thread_if_large
from quire.server.options import ServerOptions
from quire.server.routes.embeddings import embed
from quire.server.routes.rerank import rerank, score

if TYPE_CHECKING:
    from quire.client.service import Models

log = logging.getLogger("quire.batch")

_encode = msgspec.json.Encoder().encode


class NoHistory:
    """A batch stores no responses."""

    def response(self, tenant: str, name: str) -> StoredResponse:
        what = f"no response `{name}`: a batch stores none"
        raise BadRequest(what, "send the whole input", param="previous_response_id")

    def items(self, tenant: str) -> dict[str, InputItem | OutputItem]:
        return {}


def _parse_response(body: bytes, context: Context) -> ResponseCall:
    return parse_response(body, context, NoHistory())


ENCODERS: dict[str, Callable[["Models", bytes], Awaitable[object]]] = {
    "/v1/embeddings": embed,
    "/v1/score": score,
    "/score": score,
    "/v1/rerank": rerank,
    "/rerank": rerank,
    "/v2/rerank": rerank,
}
PARSERS: dict[str, Callable[[bytes, Context], Call]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": _parse_response,
}
URLS = (*PARSERS, *ENCODERS)


async def run_batch(
    models: "Models", requests: Iterator[BatchRequest], concurrency: int, on_result: Callable[[BatchResult], None]
) -> None:
    """Call `on_result` with every result as it finishes, `concurrency` requests in flight. Cancelling it cancels them;
    they have no results."""
    batch = Batch(models)

    async def work() -> None:
        for request in requests:  # all workers take from the same iterator
            on_result(await batch.result(request))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())
    except ExceptionGroup as group:  # `on_result` failed: for one as for all
        raise group.exceptions[0] from None


class Batch:
    def __init__(self, models: "Models") -> None:
        self._models = models
        self._options = ServerOptions()

    async def result(self, request: BatchRequest) -> BatchResult:
        line = request.line
        result = BatchResult(id=result_id(request.repeat), custom_id=line.custom_id)
        if line.method != "POST":
            result.error = BatchError("invalid_method", f"the method is {line.method}, and POST is possible")
        elif line.url not in URLS:
            known = ", ".join(URLS)
            result.error = BatchError("invalid_url", f"the url is {line.url}, and {known} are possible")
        else:
            result.response = await self._reply(line)
        return result

    async def _reply(self, line: BatchLine) -> BatchReply:
        request_id = uuid4().hex
        try:
            return BatchReply(200, request_id, msgspec.Raw(_encode(await self._answer(line))))
        except QuireError as error:
            failed = error
        except Exception:
            log.exception("request `%s` failed", line.custom_id)
            failed = EngineFailed("the server failed on this request")
        body = msgspec.Raw(_encode(WIRE.error(failed)))
        return BatchReply(WIRE.status(failed), request_id, body)

    async def _answer(self, line: BatchLine) -> object:
        body = bytes(line.body)
        while True:
            try:
                if encode := ENCODERS.get(line.url):
                    return await encode(self._models, body)
                return await self._generate(line.url, body)
            except QueueFull as full:  # by requests with many samples or prompts
                await asyncio.sleep(full.retry_after)

    async def _generate(self, url: str, body: bytes) -> object:
        model = await in_thread_if_large(body, model_field, body)
        service, call = await parse_call(self._models, self._options, model, body, PARSERS[url])
        if call.stream:
            raise BadRequest("a batch cannot stream", "leave out stream", param="stream")
        if isinstance(call, ResponseCall) and call.background:
            raise BadRequest("a batch always runs in the background", "leave out background", param="background")
        return await complete(service, call)

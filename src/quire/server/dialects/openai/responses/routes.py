"""The routes of /v1/responses."""

import asyncio
import logging
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import BadRequest, QuireError
from quire.server.dialects.chat_text import chat_text
from quire.server.dialects.dialect import Context, Dialect
from quire.server.dialects.generate import answered, refusing, reply, streamed, understood
from quire.server.dialects.openai.responses.body import NOT_SUPPORTED, ResponseBody
from quire.server.dialects.openai.responses.call import ResponseCall, parse_response
from quire.server.dialects.openai.responses.items import InputItem
from quire.server.dialects.openai.responses.journal import EventsGone
from quire.server.dialects.openai.responses.shapes import ResponseEvent, ResponseObject, response_sse
from quire.server.dialects.openai.responses.store import ResponseStore, StoredResponse
from quire.server.dialects.openai.shapes import error_body
from quire.server.http.event_stream import EventStream
from quire.server.http.openapi import EVENTS, JSON, answers, asks, reads
from quire.server.http.replies import json_response

if TYPE_CHECKING:
    from quire.client.service import Service
    from quire.server.app_state import AppState

log = logging.getLogger("quire.server")

SHAPE = Dialect(name="responses", routes={}, error=error_body, frame=response_sse, idle=b": keep-alive\n\n")
MAX_LISTED = 100


class Deleted(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(Struct, kw_only=True):
    object: str = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseRoutes:
    def __init__(self, state: "AppState") -> None:
        self._state = state
        self._store = ResponseStore()
        self._under_way: set[asyncio.Task[None]] = set()  # in the background: a task that nobody holds may vanish

    def routes(self) -> list[Route]:
        one = "/v1/responses/{name}"
        return [
            Route("/v1/responses", refusing(SHAPE, self.create), methods=["POST"]),
            Route("/v1/responses/input_tokens", refusing(SHAPE, self.input_tokens), methods=["POST"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    @reads(ResponseBody, only=NOT_SUPPORTED)
    @answers({JSON: ResponseObject, EVENTS: ResponseEvent})
    async def create(self, http: Request) -> Response:
        service, call = await understood(http, self._state.models, SHAPE, self._parse, self._state.options)
        if call.background:
            if call.stream:
                call.stored.journal = self._store.journal(_tenant(http))
            await self._begin(service, call, _tenant(http))
            return self._followed(call.stored) if call.stream else json_response(call.response)
        if call.response.store:
            call.keep = lambda stored: self._store.put(_tenant(http), stored)
        return await reply(http, SHAPE, service, call, self._state.options.sse_keep_alive)

    @reads(ResponseBody, only=NOT_SUPPORTED)
    @answers({JSON: InputTokens})
    async def input_tokens(self, http: Request) -> Response:
        """Of a response that could be asked for."""
        service, call = await understood(http, self._state.models, SHAPE, self._parse, self._state.options)
        [request] = call.requests
        text = chat_text(service.tokenizer, request.messages or [], **request.template_options)
        ids = await asyncio.to_thread(service.tokenizer.encode, text, add_special_tokens=False)
        return json_response(InputTokens(len(ids)))

    @asks(stream=bool, starting_after=Annotated[int, Meta(ge=0)])
    @answers({JSON: ResponseObject, EVENTS: ResponseEvent})
    async def retrieve(self, http: Request) -> Response:
        stored, after = self._found(http), http.query_params.get("starting_after")
        stream = http.query_params.get("stream", "false").lower()
        if stream not in ("true", "false"):
            raise BadRequest(f"stream is {stream}", "give true or false", param="stream")
        if stream == "false":
            if after is not None:
                raise BadRequest("starting_after is given without stream", "add stream=true", param="starting_after")
            return json_response(stored.response)
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise BadRequest(f"starting_after is {after}", "give the number of an event", param="starting_after")
        return self._followed(stored, 0 if after is None else int(after) + 1)

    def _followed(self, stored: StoredResponse, first: int = 0) -> Response:
        """Its events from number `first` on. Who leaves can come back: it goes on without them."""
        if stored.journal is None:
            hint = "only those that were created with background and stream can"
            raise BadRequest("this response cannot be streamed", hint, param="stream")
        if first < stored.journal.first:
            raise EventsGone.before(stored.journal.first)
        return EventStream(SHAPE, stored.journal.follow(first), self._state.options.sse_keep_alive)

    @answers({JSON: Deleted})
    async def delete(self, http: Request) -> Response:
        stored = self._store.delete(_tenant(http), http.path_params["name"])
        if stored.task is not None:
            stored.task.cancel()
        return json_response(Deleted(stored.response.id))

    @answers({JSON: ResponseObject})
    async def cancel(self, http: Request) -> Response:
        stored = self._found(http)
        if not stored.response.background:
            raise BadRequest("only a response in the background can be cancelled", "close the connection instead")
        if (task := stored.task) is not None:
            task.cancel()
            await asyncio.wait({task})
        return json_response(stored.response)

    @asks(order=Literal["asc", "desc"], after=str, limit=Annotated[int, Meta(ge=1, le=MAX_LISTED)])
    @answers({JSON: ItemList})
    async def input_items(self, http: Request) -> Response:
        """A page of them: the newest first, unless `order` is asc."""
        items = self._found(http).input
        asked = http.query_params
        if asked.get("order", "desc") != "asc":
            items = items[::-1]
        if after := asked.get("after"):
            at = next((at for at, item in enumerate(items) if item.id == after), None)
            if at is None:
                raise BadRequest(f"no item `{after}`", param="after")
            items = items[at + 1 :]
        limit = asked.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= MAX_LISTED:
            raise BadRequest(f"limit is {limit}", f"give 1 to {MAX_LISTED}", param="limit")
        page = items[: int(limit)]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        more = len(items) > len(page)
        return json_response(ItemList(data=page, first_id=first, last_id=last, has_more=more))

    def _parse(self, body: bytes, context: Context) -> ResponseCall:
        return parse_response(body, context, self._recall)

    def _recall(self, tenant: str, name: str) -> StoredResponse:
        """A response that another may follow."""
        stored = self._store.get(tenant, name, "previous_response_id")
        if stored.response.status not in ("completed", "incomplete"):
            raise BadRequest(f"response `{name}` is {stored.response.status}", param="previous_response_id")
        return stored

    def _found(self, http: Request) -> StoredResponse:
        return self._store.get(_tenant(http), http.path_params["name"])

    async def _begin(self, service: "Service", call: ResponseCall, tenant: str) -> None:
        """In the background, once it is accepted: a refusal is told here and now."""
        call.stored.task = task = asyncio.create_task(_run(service, call))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        accepted = asyncio.create_task(call.accepted.wait())
        await asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
        accepted.cancel()
        if not call.accepted.is_set() and call.problem is not None:
            raise call.problem
        self._store.put(tenant, call.stored)


async def _run(service: "Service", call: ResponseCall) -> None:
    try:
        await (streamed(service, call) if call.stream else answered(service, call))
    except QuireError as error:
        call.fail(error)
    except asyncio.CancelledError:
        call.cancel()
        raise
    except Exception:
        log.exception("response %s failed in the background", call.response.id)
        call.fail(QuireError("the server failed on this request"))
    finally:
        call.stored.task = None


def _tenant(http: Request) -> str:
    return str(http.scope.get("tenant", ""))

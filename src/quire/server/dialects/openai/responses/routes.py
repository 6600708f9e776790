"""The routes of /v1/responses."""

import asyncio
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import BadRequest, QuireError
from quire.server.access.request_context import current_tenant
from quire.server.dialects.chat_text import num_chat_tokens
from quire.server.dialects.dialect import Context, model_field
from quire.server.dialects.generate import complete, parse_call, respond, run_stream
from quire.server.dialects.openai.responses.body import NOT_SUPPORTED, ResponseBody
from quire.server.dialects.openai.responses.call import ResponseCall, parse_response
from quire.server.dialects.openai.responses.items import InputItem
from quire.server.dialects.openai.responses.journal import EventsGone
from quire.server.dialects.openai.responses.shapes import WIRE, OutputItem, ResponseEvent, ResponseObject
from quire.server.dialects.openai.responses.store import ResponseStore, StoredResponse
from quire.server.http.body import in_thread_if_large, read_body
from quire.server.http.event_stream import EventStream
from quire.server.http.openapi import EVENTS, JSON, query_parameters, request_body, responses
from quire.server.http.replies import json_response, with_wire_errors

if TYPE_CHECKING:
    from quire.client.service import Service
    from quire.server.app_state import AppState

log = logging.getLogger("quire.server")

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
        self._background: set[asyncio.Task[None]] = set()  # asyncio itself keeps weak references only

    def routes(self) -> list[Route]:
        one = "/v1/responses/{name}"
        return [
            Route("/v1/responses", with_wire_errors(self.create, WIRE), methods=["POST"]),
            Route("/v1/responses/input_tokens", with_wire_errors(self.input_tokens, WIRE), methods=["POST"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    @request_body(ResponseBody, only=NOT_SUPPORTED)
    @responses({JSON: ResponseObject, EVENTS: ResponseEvent})
    async def create(self, http: Request) -> Response:
        service, call = await self._parse_call(http)
        tenant = current_tenant()
        if call.background:
            if call.stream:
                call.stored.journal = self._store.journal(tenant)
            await self._begin(service, call, tenant)
            return self._follow(call.stored) if call.stream else json_response(call.response)
        if call.response.store:
            put = partial(self._store.put, tenant)  # on the event loop: a long answer is written in a thread
            call.keep = partial(asyncio.get_running_loop().call_soon_threadsafe, put)
        return await respond(http, WIRE, service, call, self._state.options.sse_keep_alive)

    @request_body(ResponseBody, only=NOT_SUPPORTED)
    @responses({JSON: InputTokens})
    async def input_tokens(self, http: Request) -> Response:
        """The prompt tokens that a response would have."""
        service, call = await self._parse_call(http)
        [request] = call.requests
        count = partial(num_chat_tokens, service, request.messages or [], **request.template_options)
        return json_response(InputTokens(await asyncio.to_thread(count)))

    @query_parameters(stream=bool, starting_after=Annotated[int, Meta(ge=0)])
    @responses({JSON: ResponseObject, EVENTS: ResponseEvent})
    async def retrieve(self, http: Request) -> Response:
        stored, after = self._stored(http), http.query_params.get("starting_after")
        stream = http.query_params.get("stream", "false").lower()
        if stream not in ("true", "false"):
            raise BadRequest(f"stream is {stream}", "give true or false", param="stream")
        if stream == "false":
            if after is not None:
                raise BadRequest("starting_after is given without stream", "add stream=true", param="starting_after")
            return json_response(stored.response)
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise BadRequest(f"starting_after is {after}", "give the number of an event", param="starting_after")
        return self._follow(stored, 0 if after is None else int(after) + 1)

    def _follow(self, stored: StoredResponse, first: int = 0) -> Response:
        """Stream its events from number `first` on. A client may disconnect and come back: generation goes on."""
        if stored.journal is None:
            hint = "only responses that were created with background and stream can"
            raise BadRequest("this response cannot be streamed", hint, param="stream")
        if first < stored.journal.first:
            raise EventsGone.before(stored.journal.first)
        return EventStream(WIRE, stored.journal.follow(first), self._state.options.sse_keep_alive)

    @responses({JSON: Deleted})
    async def delete(self, http: Request) -> Response:
        stored = self._store.delete(current_tenant(), http.path_params["name"])
        if stored.task is not None:
            stored.task.cancel()
        return json_response(Deleted(stored.response.id))

    @responses({JSON: ResponseObject})
    async def cancel(self, http: Request) -> Response:
        stored = self._stored(http)
        if not stored.response.background:
            raise BadRequest("only a response in the background can be cancelled", "close the connection instead")
        if (task := stored.task) is not None:
            task.cancel()
            await asyncio.wait({task})
        return json_response(stored.response)

    @query_parameters(order=Literal["asc", "desc"], after=str, limit=Annotated[int, Meta(ge=1, le=MAX_LISTED)])
    @responses({JSON: ItemList})
    async def input_items(self, http: Request) -> Response:
        """A page of them: the newest first, unless `order` is asc."""
        items = self._stored(http).input
        query = http.query_params
        if query.get("order", "desc") != "asc":
            items = items[::-1]
        if after := query.get("after"):
            index = next((index for index, item in enumerate(items) if item.id == after), None)
            if index is None:
                raise BadRequest(f"no item `{after}`", param="after")
            items = items[index + 1 :]
        limit = query.get("limit", "20")
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_LISTED:
            raise BadRequest(f"limit is {limit}", f"give 1 to {MAX_LISTED}", param="limit")
        page = items[: int(limit)]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        more = len(items) > len(page)
        return json_response(ItemList(data=page, first_id=first, last_id=last, has_more=more))

    async def _parse_call(self, http: Request) -> tuple["Service", ResponseCall]:
        body = await read_body(http, self._state.options.max_body_bytes)
        model = await in_thread_if_large(body, model_field, body)
        return await parse_call(self._state.models, self._state.options, model, body, self._parse)

    def _parse(self, body: bytes, context: Context) -> ResponseCall:
        return parse_response(body, context, self)

    def items(self, tenant: str) -> dict[str, InputItem | OutputItem]:
        return self._store.items(tenant)

    def response(self, tenant: str, name: str) -> StoredResponse:
        """A stored response that another may continue."""
        stored = self._store.get(tenant, name, "previous_response_id")
        if stored.response.status not in ("completed", "incomplete"):
            raise BadRequest(f"response `{name}` is {stored.response.status}", param="previous_response_id")
        return stored

    def _stored(self, http: Request) -> StoredResponse:
        return self._store.get(current_tenant(), http.path_params["name"])

    async def _begin(self, service: "Service", call: ResponseCall, tenant: str) -> None:
        """Start it in the background. Returns once it is accepted, so that a refusal has its HTTP status."""
        call.stored.task = task = asyncio.create_task(_run(service, call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        accepted = asyncio.create_task(call.accepted.wait())
        await asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
        accepted.cancel()
        if not call.accepted.is_set() and call.problem is not None:
            raise call.problem
        self._store.put(tenant, call.stored)


async def _run(service: "Service", call: ResponseCall) -> None:
    try:
        await (run_stream(service, call) if call.stream else complete(service, call))
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

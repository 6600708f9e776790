"""POST /abort_requests, as in vLLM, and /abort_request, as in SGLang: end requests by their ids, from any
connection."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import BadRequest
from quire.server.access.metered import MeteredModels
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response


class AbortBody(Struct, kw_only=True, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], Meta(min_length=1, max_length=1024)]


class AbortOneBody(Struct, kw_only=True):
    """SGLang's."""

    rid: str = ""
    abort_all: bool = False


class AbortedRequests(Struct):
    aborted: list[str]  # ids of requests that were in flight


_decoder = msgspec.json.Decoder(AbortBody)
_one = msgspec.json.Decoder(AbortOneBody)


class AbortRoutes:
    def __init__(self, models: MeteredModels, max_body_bytes: int) -> None:
        self._models, self._limit = models, max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/abort_requests", self.abort, methods=["POST"]),
            Route("/abort_request", self.abort_one, methods=["POST"]),
        ]

    @request_body(AbortBody)
    @responses({JSON: AbortedRequests})
    async def abort(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _decoder)
        aborted = await self._models.abort(body.request_ids)
        return json_response(AbortedRequests([name for name in body.request_ids if name in aborted]))

    @request_body(AbortOneBody)
    @responses({JSON: AbortedRequests})
    async def abort_one(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _one)
        if body.abort_all or not body.rid:
            raise BadRequest("requests are aborted by their ids", "give the rid of one", param="rid")
        return json_response(AbortedRequests(sorted(await self._models.abort([body.rid]))))

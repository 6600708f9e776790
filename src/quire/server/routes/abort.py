"""POST /abort_requests, as in vLLM: end requests by their ids, from any connection."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.access.metered import MeteredModels
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response


class AbortBody(Struct, kw_only=True, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], Meta(min_length=1, max_length=1024)]


class AbortedRequests(Struct):
    aborted: list[str]  # ids of requests that were in flight


_decoder = msgspec.json.Decoder(AbortBody)


class AbortRoutes:
    def __init__(self, models: MeteredModels, max_body_bytes: int) -> None:
        self._models, self._limit = models, max_body_bytes

    def routes(self) -> list[Route]:
        return [Route("/abort_requests", self.abort, methods=["POST"])]

    @request_body(AbortBody)
    @responses({JSON: AbortedRequests})
    async def abort(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _decoder)
        aborted = await self._models.abort(body.request_ids)
        return json_response(AbortedRequests([name for name in body.request_ids if name in aborted]))

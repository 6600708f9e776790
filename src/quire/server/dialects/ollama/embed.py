"""POST /api/embed, and its older form /api/embeddings."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.client.embed_request import EmbedRequest
from quire.server.dialects.fields import Int, new_id
from quire.server.dialects.ollama.fields import bare_name
from quire.server.http.body import check_number, read_json
from quire.server.http.event_stream import unless_disconnected
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response, json_vector

if TYPE_CHECKING:
    from quire.client.embed_request import Embeddings
    from quire.server.app_state import AppState


class EmbedBody(Struct, kw_only=True):
    model: str
    input: str | list[str]
    truncate: bool | None = None  # true unless given: cut texts that are too long
    dimensions: Int | None = None
    options: dict[str, Any] | None = None  # these two are accepted, without effect
    keep_alive: Any = None


class OldEmbedBody(Struct, kw_only=True):
    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class Embedded(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OldEmbedded(Struct):
    embedding: list[float]


_embed = msgspec.json.Decoder(EmbedBody)
_old = msgspec.json.Decoder(OldEmbedBody)


class EmbedRoutes:
    def __init__(self, state: "AppState") -> None:
        self._models = state.models
        self._limit = state.options.max_body_bytes

    @request_body(EmbedBody)
    @responses({JSON: Embedded})
    async def embed(self, http: Request) -> Response:
        began = time.monotonic_ns()
        body = await read_json(http, self._limit, _embed, json_only=False)
        texts = [body.input] if isinstance(body.input, str) else body.input
        check_number(texts, "input")
        if not texts:
            return json_response(Embedded(body.model, [], time.monotonic_ns() - began, 0, 0))
        embeddings = await self._embed(http, body.model, texts, body.truncate is not False, body.dimensions)
        vectors = await asyncio.to_thread(lambda: list(map(json_vector, embeddings.vectors)))
        return json_response(Embedded(body.model, vectors, time.monotonic_ns() - began, 0, embeddings.num_tokens))

    @request_body(OldEmbedBody)
    @responses({JSON: OldEmbedded})
    async def embeddings(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _old, json_only=False)
        if not body.prompt:
            return json_response(OldEmbedded([]))
        embeddings = await self._embed(http, body.model, [body.prompt], True)
        return json_response(OldEmbedded(embeddings.vectors[0].tolist()))

    async def _embed(
        self, http: Request, model: str, texts: list[str], truncate: bool, dimensions: int | None = None
    ) -> "Embeddings":
        service = (await self._models.find(bare_name(model))).service
        request = EmbedRequest(id=new_id("embd"), texts=[*texts], dimensions=dimensions, truncate=truncate)
        return await unless_disconnected(http.receive, service.embed(request))

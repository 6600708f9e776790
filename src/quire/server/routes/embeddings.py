"""POST /v1/embeddings, as at OpenAI, and /pooling, as in vLLM."""

import asyncio
import base64
from array import array
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.client.embed_request import EmbedRequest, Text
from quire.core.errors import BadRequest
from quire.server.app_state import AppState
from quire.server.dialects.fields import Int, created_now, new_id
from quire.server.http.body import decode, in_thread_if_large, read_body, texts_or_ids
from quire.server.http.event_stream import unless_disconnected
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response, json_vector

if TYPE_CHECKING:
    from quire.client.service import Models


class EmbeddingsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as absent."""

    model: str | None = None
    input: str | list[str | Int | list[Int]]  # a text, texts, token ids, or lists of token ids
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    truncate_prompt_tokens: Int | None = None  # cut longer texts; -1: to what the model takes
    prompt_name: str | None = None  # one of the checkpoint's prompts
    user: str | None = None  # these are accepted, without effect
    request_id: str | None = None


class PoolingBody(EmbeddingsBody, kw_only=True, forbid_unknown_fields=True):
    task: Literal["embed"] | None = None


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Pooled(Struct):
    index: int
    data: list[float] | str
    object: str = "pooling"


class PooledList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


_decoder = msgspec.json.Decoder(EmbeddingsBody)
_pooling = msgspec.json.Decoder(PoolingBody)


class EmbeddingRoutes:
    def __init__(self, state: AppState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/pooling", self.pooling, methods=["POST"]),
        ]

    @request_body(EmbeddingsBody)
    @responses({JSON: EmbeddingList})
    async def embeddings(self, http: Request) -> Response:
        body = await read_body(http, self._state.options.max_body_bytes)
        return json_response(await unless_disconnected(http.receive, embed(self._state.models, body)))

    @request_body(PoolingBody)
    @responses({JSON: PooledList})
    async def pooling(self, http: Request) -> Response:
        body = await read_body(http, self._state.options.max_body_bytes)
        made = await unless_disconnected(http.receive, embed(self._state.models, body, _pooling))
        data = [Pooled(each.index, each.embedding) for each in made.data]
        return json_response(
            PooledList(id=new_id("pool"), created=created_now(), model=made.model, data=data, usage=made.usage)
        )


async def embed(models: "Models", body: bytes, decoder: "msgspec.json.Decoder[Any]" = _decoder) -> EmbeddingList:
    given: EmbeddingsBody = await in_thread_if_large(body, decode, body, decoder)
    texts = _texts(given.input)
    service = (await models.find(given.model)).service
    request = EmbedRequest(
        id=new_id("embd"),
        texts=texts,
        dimensions=given.dimensions,
        truncate=truncates(given.truncate_prompt_tokens),
        prompt_name=given.prompt_name,
    )
    embeddings = await service.embed(request)
    encode = _base64 if given.encoding_format == "base64" else json_vector
    vectors = await asyncio.to_thread(lambda: list(map(encode, embeddings.vectors)))
    return EmbeddingList(
        data=[Embedding(index, vector) for index, vector in enumerate(vectors)],
        model=service.info.name,
        usage=EmbeddingUsage(embeddings.num_tokens, embeddings.num_tokens),
    )


def truncates(truncate_prompt_tokens: int | None) -> bool | int:
    if truncate_prompt_tokens in (None, -1):
        return truncate_prompt_tokens is not None
    if truncate_prompt_tokens < 1:
        raise BadRequest(
            f"truncate_prompt_tokens is {truncate_prompt_tokens}",
            "keep at least one, or -1: what the model takes",
            param="truncate_prompt_tokens",
        )
    return truncate_prompt_tokens


def _texts(given: str | list[str | int | list[int]]) -> list[Text]:
    return [*texts_or_ids(given, "input")]


def _base64(vector: "array[float]") -> Any:
    """float32, little-endian."""
    return base64.b64encode(vector.tobytes()).decode()

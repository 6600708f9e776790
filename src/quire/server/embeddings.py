"""POST /v1/embeddings, as OpenAI has it."""

import base64
from array import array
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import BadRequest
from quire.engine.texts import EmbedRequest, Text
from quire.server.body import decode, read_body
from quire.server.dialects.openai.fields import Int, new_id
from quire.server.generate import unless_gone
from quire.server.openapi import JSON, answers, reads
from quire.server.replies import json_response
from quire.server.site import Site

MOST_TEXTS = 2048  # of one request, as OpenAI


class EmbeddingsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as absent."""

    model: str | None = None
    input: str | list[str | Int | list[Int]]  # a text, texts, token ids, or lists of token ids
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    truncate_prompt_tokens: Int | None = None  # -1: a text that is too long loses its end
    prompt_name: str | None = None  # of the prompts that the checkpoint has
    user: str | None = None  # taken, and changes nothing


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


_decoder = msgspec.json.Decoder(EmbeddingsBody)


class Embeddings:
    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[Route]:
        return [Route("/v1/embeddings", self.embeddings, methods=["POST"])]

    @reads(EmbeddingsBody)
    @answers({JSON: EmbeddingList})
    async def embeddings(self, http: Request) -> Response:
        body = decode(await read_body(http, self._site.options.max_body_bytes), _decoder)
        texts = _texts(body.input)
        service = (await self._site.models.find(body.model)).service
        asked = EmbedRequest(
            id=new_id("embd"),
            texts=texts,
            dimensions=body.dimensions,
            truncate=truncates(body.truncate_prompt_tokens),
            prompt_name=body.prompt_name,
        )
        found = await unless_gone(http.receive, service.embed(asked))
        spelled = _base64 if body.encoding_format == "base64" else array.tolist
        return json_response(
            EmbeddingList(
                data=[Embedding(index, spelled(vector)) for index, vector in enumerate(found.vectors)],
                model=service.info.name,
                usage=EmbeddingUsage(found.num_tokens, found.num_tokens),
            )
        )


def truncates(truncate_prompt_tokens: int | None) -> bool:
    if truncate_prompt_tokens not in (None, -1):
        raise BadRequest(
            f"truncate_prompt_tokens is {truncate_prompt_tokens}",
            "-1 cuts texts to what the model takes",
            param="truncate_prompt_tokens",
        )
    return truncate_prompt_tokens is not None


def _texts(given: str | list[str | int | list[int]]) -> list[Text]:
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if not given or len(kinds) > 1:
        what = "is empty" if not given else "mixes texts and ids"
        raise BadRequest(f"input {what}", "send a text, texts, token ids, or lists of token ids", param="input")
    texts: list[Any] = [given] if kinds == {int} else given
    if len(texts) > MOST_TEXTS:
        raise BadRequest(
            f"input has {len(texts)} texts, and {MOST_TEXTS} are allowed", "send several requests", param="input"
        )
    return texts


def _base64(vector: "array[float]") -> str:
    """float32, little-endian."""
    return base64.b64encode(vector.tobytes()).decode()

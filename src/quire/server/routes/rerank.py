"""POST /v1/rerank (as at Jina and Cohere, and in Text Embeddings Inference) and /v1/score, in vLLM's shapes."""

import time
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.client.embed_request import ScoreRequest, Scores
from quire.core.errors import BadRequest
from quire.server.app_state import AppState
from quire.server.dialects.fields import Int, new_id
from quire.server.http.body import check_number, decode, in_thread_if_large, read_body
from quire.server.http.event_stream import unless_disconnected
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response
from quire.server.routes.embeddings import EmbeddingUsage, truncates

if TYPE_CHECKING:
    from quire.client.service import Models


class Document(Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """With `documents`, or with `texts` as Text Embeddings Inference has it, which answers with a list."""

    model: str | None = None
    query: str
    documents: list[str | Document] | None = None
    top_n: Int | None = None  # how many are returned; 0 and null: all
    return_documents: bool | None = None  # null: true
    truncate_prompt_tokens: Int | None = None  # cut the longer text of a pair; -1: to what the model takes
    user: str | None = None

    texts: list[str] | None = None  # these are of Text Embeddings Inference
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    raw_scores: Literal[False] | None = None


class ScoreBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One text against one or several, or pairs of texts: text_1 and text_2, or vLLM's other names of them."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None  # of queries
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    truncate_prompt_tokens: Int | None = None
    user: str | None = None


class Ranked(Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]


class RankedText(Struct):
    index: int
    score: float
    text: str | UnsetType = UNSET


class Score(Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int  # seconds since 1970
    model: str
    data: list[Score]
    usage: EmbeddingUsage


RANKING = "/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"  # the last two as in llama-server
SCORED = ["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]

_rerank = msgspec.json.Decoder(RerankBody)
_score = msgspec.json.Decoder(ScoreBody)


class RerankRoutes:
    def __init__(self, state: AppState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        ranking = [Route(path, self.rerank, methods=["POST"]) for path in RANKING]
        return [*ranking, *(Route(path, self.score, methods=["POST"]) for path in ("/v1/score", "/score"))]

    @request_body(RerankBody)
    @responses({JSON: Ranking | list[RankedText]})
    async def rerank(self, http: Request) -> Response:
        body = await read_body(http, self._state.options.max_body_bytes)
        return json_response(await unless_disconnected(http.receive, rerank(self._state.models, body)))

    @request_body(ScoreBody)
    @responses({JSON: ScoreList})
    async def score(self, http: Request) -> Response:
        body = await read_body(http, self._state.options.max_body_bytes)
        return json_response(await unless_disconnected(http.receive, score(self._state.models, body)))


async def rerank(models: "Models", body: bytes) -> Ranking | list[RankedText]:
    given = await in_thread_if_large(body, decode, body, _rerank)
    if given.top_n is not None and given.top_n < 0:
        raise BadRequest(f"top_n is {given.top_n}", "it is the number of documents to return", param="top_n")
    texts, field = _ranked_texts(given)
    truncate = bool(given.truncate) or truncates(given.truncate_prompt_tokens)
    name, scores = await _scores(models, given.model, [(given.query, text) for text in texts], truncate, field)
    order = sorted(range(len(texts)), key=lambda index: -scores.scores[index])[: given.top_n or None]
    if given.texts is not None:
        shown = [RankedText(index, scores.scores[index]) for index in order]
        for each in shown if given.return_text else ():
            each.text = texts[each.index]
        return shown
    results = [Ranked(index, scores.scores[index]) for index in order]
    for result in results if given.return_documents is not False else ():
        result.document = Document(texts[result.index])
    return Ranking(new_id("rerank"), name, EmbeddingUsage(scores.num_tokens, scores.num_tokens), results)


def _ranked_texts(body: RerankBody) -> tuple[list[str], str]:
    """-> the texts, and the field they came from"""
    if (body.documents is None) == (body.texts is None):
        raise BadRequest("give either `documents` or `texts`", param="documents")
    if body.texts is not None:
        return body.texts, "texts"
    return [document if isinstance(document, str) else document.text for document in body.documents or ()], "documents"


async def score(models: "Models", body: bytes) -> ScoreList:
    given = await in_thread_if_large(body, decode, body, _score)
    pairs, field = _pairs(given)
    name, scores = await _scores(models, given.model, pairs, truncates(given.truncate_prompt_tokens), field)
    return ScoreList(
        id=new_id("score"),
        created=int(time.time()),
        model=name,
        data=[Score(index, value) for index, value in enumerate(scores.scores)],
        usage=EmbeddingUsage(scores.num_tokens, scores.num_tokens),
    )


async def _scores(
    models: "Models", model: str | None, pairs: list[tuple[str, str]], truncate: bool | int, field: str
) -> tuple[str, Scores]:
    """-> the model's name, and the score of each pair"""
    if not pairs:
        raise BadRequest(f"{field} is empty", "send at least one text", param=field)
    check_number(pairs, field)
    service = (await models.find(model)).service
    return service.info.name, await service.score(ScoreRequest(id=new_id("score"), pairs=pairs, truncate=truncate))


def _pairs(body: ScoreBody) -> tuple[list[tuple[str, str]], str]:
    """-> the pairs of texts, and the field that the second ones came from"""
    names = ("text_1", "queries", "data_1", "text_2", "documents", "items", "data_2")
    given = [name for name in names if getattr(body, name) is not None]
    if given not in SCORED:
        there = f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} there" if given else "there are no texts"
        raise BadRequest(there, "send text_1 and text_2, or queries and documents", param="text_1")
    ones, others = ([texts] if isinstance(texts := getattr(body, name), str) else texts for name in given)
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        first, second = given
        raise BadRequest(
            f"{first} has {len(ones)} texts and {second} has {len(others)}",
            f"send one of {first} for all, or as many as {second} has",
            param=first,
        )
    return list(zip(ones, others, strict=True)), given[1]

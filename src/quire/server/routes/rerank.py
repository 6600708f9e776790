"""POST /v1/rerank (as at Jina and Cohere) and /v1/score, in vLLM's shapes."""

import time

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.client.embed_request import ScoreRequest
from quire.core.errors import BadRequest
from quire.server.app_state import AppState
from quire.server.dialects.fields import Int, new_id
from quire.server.http.body import check_number, read_json
from quire.server.http.event_stream import unless_disconnected
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response
from quire.server.routes.embeddings import EmbeddingUsage, truncates


class Document(Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    query: str
    documents: list[str | Document]
    top_n: Int | None = None  # how many are returned; 0 and null: all
    return_documents: bool | None = None  # null: true
    truncate_prompt_tokens: Int | None = None  # -1: cut the longer text of a pair that is too long
    user: str | None = None


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


SCORED = ["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]

_rerank = msgspec.json.Decoder(RerankBody)
_score = msgspec.json.Decoder(ScoreBody)


class RerankRoutes:
    def __init__(self, state: AppState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        ranking = [Route(path, self.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v2/rerank")]
        return [*ranking, *(Route(path, self.score, methods=["POST"]) for path in ("/v1/score", "/score"))]

    @request_body(RerankBody)
    @responses({JSON: Ranking})
    async def rerank(self, http: Request) -> Response:
        body = await read_json(http, self._state.options.max_body_bytes, _rerank)
        if body.top_n is not None and body.top_n < 0:
            raise BadRequest(f"top_n is {body.top_n}", "it is the number of documents to return", param="top_n")
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        name, scores, num_tokens = await self._scores(
            http, body.model, [(body.query, text) for text in texts], body.truncate_prompt_tokens, "documents"
        )
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [Ranked(index, scores[index]) for index in order]
        if body.return_documents is not False:
            for result in results:
                result.document = Document(texts[result.index])
        return json_response(Ranking(new_id("rerank"), name, EmbeddingUsage(num_tokens, num_tokens), results))

    @request_body(ScoreBody)
    @responses({JSON: ScoreList})
    async def score(self, http: Request) -> Response:
        body = await read_json(http, self._state.options.max_body_bytes, _score)
        pairs, field = _pairs(body)
        name, scores, num_tokens = await self._scores(http, body.model, pairs, body.truncate_prompt_tokens, field)
        return json_response(
            ScoreList(
                id=new_id("score"),
                created=int(time.time()),
                model=name,
                data=[Score(index, score) for index, score in enumerate(scores)],
                usage=EmbeddingUsage(num_tokens, num_tokens),
            )
        )

    async def _scores(
        self, http: Request, model: str | None, pairs: list[tuple[str, str]], truncate: int | None, field: str
    ) -> tuple[str, list[float], int]:
        if not pairs:
            raise BadRequest(f"{field} is empty", "send at least one text", param=field)
        check_number(pairs, field)
        request = ScoreRequest(id=new_id("score"), pairs=pairs, truncate=truncates(truncate))
        service = (await self._state.models.find(model)).service
        scores = await unless_disconnected(http.receive, service.score(request))
        return service.info.name, scores.scores, scores.num_tokens


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

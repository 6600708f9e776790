"""The HTTP application: which path leads where."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.client.one_model import unknown_model
from quire.core.errors import QuireError
from quire.server.access.keys import KeyRing
from quire.server.access.metered import MeteredModels
from quire.server.access.quota import RATE_HEADERS
from quire.server.app_state import AppState
from quire.server.dialects import DIALECTS, load
from quire.server.dialects.dialect import Dialect
from quire.server.dialects.generate import generation_route
from quire.server.dialects.openai.shapes import error_body
from quire.server.errors import MethodNotAllowed, UnknownPath
from quire.server.http.middleware import RequestMiddleware, Shape
from quire.server.http.openapi import JSON, answers, openapi
from quire.server.http.replies import error_response, json_response
from quire.server.observe.metrics import Metrics
from quire.server.observe.tracing import tracer
from quire.server.options import ServerOptions
from quire.server.routes.abort import AbortRoutes
from quire.server.routes.embeddings import EmbeddingRoutes
from quire.server.routes.live import LiveRoutes
from quire.server.routes.page import page_routes
from quire.server.routes.rerank import RerankRoutes
from quire.server.routes.tokens import TokenizerRoutes

if TYPE_CHECKING:
    from quire.client.service import Models, ServedModel


def create_app(
    models: "Models", options: ServerOptions, metrics: Metrics | None = None, keys: KeyRing | None = None
) -> Starlette:
    """`metrics` is the observer the models were given, if they were given one; `keys` are those of the options."""
    metrics = metrics or Metrics()
    keys = keys or KeyRing(options.api_key, options.keys_file)
    metered = MeteredModels(models)
    paths = RouteTable(AppState(metered, options, metrics), metered)
    return Starlette(
        routes=paths.routes,
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
            ),
            Middleware(
                RequestMiddleware, options, keys, metrics, paths.routes, paths.shapes, error_body, tracer(options)
            ),
        ],
        exception_handlers={HTTPException: paths.refused},
    )


class RouteTable:
    """Which path leads where, and how an error looks there."""

    def __init__(self, state: AppState, metered: MeteredModels) -> None:
        self.routes = _own_routes(state, metered)
        self.shapes: dict[str, Shape] = {}  # of the paths that belong to a dialect
        self._parsers: dict[str, Callable[..., Any]] = {}
        self._below: dict[str, Shape] = {}  # of paths that begin so
        for dialect in map(load, DIALECTS):
            self._add(dialect, state)
        self.routes.append(Route("/openapi.json", self.description))

    def _add(self, dialect: Dialect, state: AppState) -> None:
        self._parsers |= dialect.routes
        routes = dialect.pages(state)
        for path, parse in dialect.routes.items():
            handle = generation_route(state.models, dialect, parse, state.options)
            routes.append(Route(path, handle, methods=["POST"]))
        self.routes += routes
        self.shapes |= dict.fromkeys((route.path for route in routes), dialect.error)
        if dialect.below:
            self._below[dialect.below] = dialect.error

    @answers({JSON: dict[str, Any]})
    async def description(self, http: Request) -> Response:
        return json_response(openapi(self.routes, self._parsers, self.shapes, error_body))

    async def refused(self, http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = http.url.path
        near = next((each for prefix, each in self._below.items() if path.startswith(prefix)), error_body)
        response = error_response(_as_ours(http, error), self.shapes.get(path, near))
        response.headers.update(error.headers or {})
        return response


def _own_routes(state: AppState, metered: MeteredModels) -> list[Route]:
    """Those that belong to no dialect."""
    tokens, pages = TokenizerRoutes(state.models, state.options.max_body_bytes), InfoRoutes(state)
    return [
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/health", pages.health),
        Route("/ping", pages.health),  # SageMaker's name of it
        Route("/ready", pages.ready),
        Route("/metrics", pages.metrics_text),
        Route("/version", pages.version),
        Route("/abort_requests", AbortRoutes(metered, state.options.max_body_bytes).abort, methods=["POST"]),
        *EmbeddingRoutes(state).routes(),
        *RerankRoutes(state).routes(),
        Route("/live", LiveRoutes(state).view),
        *page_routes(),
    ]


def _as_ours(http: Request, error: HTTPException) -> QuireError:
    what = f"{http.method} {http.url.path}"
    if error.status_code == 405:
        return MethodNotAllowed(f"{what}: this path does not take {http.method}")
    if error.status_code == 404:
        return UnknownPath(f"{what}: there is nothing here", "the routes are listed in docs/http.md")
    raise AssertionError(f"unexpected HTTP status {error.status_code}") from error


class ModelCard(Struct, kw_only=True):
    """For clients of OpenAI and vLLM, and for those of Anthropic, who look for `type` and the two behind it."""

    id: str
    object: str = "model"
    created: int  # seconds since 1970
    type: str = "model"
    display_name: str
    created_at: str
    owned_by: str = "quire"
    root: str
    parent: str | None
    max_model_len: int | None
    task: str | None


class ModelList(Struct):
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


class ServerStatus(Struct):
    status: str


class ServerVersion(Struct):
    version: str


class InfoRoutes:
    """What can be asked about the server."""

    def __init__(self, state: AppState) -> None:
        self._models = state.models
        self._metrics = state.metrics
        self._created = datetime.now(UTC)

    @answers({JSON: ModelList})
    async def models(self, http: Request) -> Response:
        models = list(map(self._model, self._models.offers()))
        names: list[str | None] = [model.id for model in models] or [None]
        return json_response(ModelList(models, names[0], names[-1]))

    @answers({JSON: ModelCard})
    async def model(self, http: Request) -> Response:
        name, offers = http.path_params["name"], {offer.name: offer for offer in self._models.offers()}
        if name not in offers:
            raise unknown_model(name, list(offers))
        return json_response(self._model(offers[name]))

    def _model(self, offer: "ServedModel") -> ModelCard:
        return ModelCard(
            id=offer.name,
            created=int(self._created.timestamp()),
            display_name=offer.name,
            created_at=self._created.isoformat(timespec="seconds"),
            root=offer.adapter_of or offer.name,
            parent=offer.adapter_of or None,
            max_model_len=offer.info.max_model_len if offer.info else None,
            task=offer.info.task if offer.info else None,
        )

    @answers({JSON: ServerStatus}, also=(503,))
    async def health(self, http: Request) -> Response:
        state = self._models.state
        return json_response(ServerStatus(state), 503 if state == "stopped" else 200)

    @answers({JSON: ServerStatus}, also=(503,))
    async def ready(self, http: Request) -> Response:
        state = self._models.state
        return json_response(ServerStatus(state), 200 if state == "ready" else 503)

    @answers({"text/plain": str})
    async def metrics_text(self, http: Request) -> Response:
        from quire.server.observe.exposition import MEDIA_TYPE, prometheus_text

        return Response(prometheus_text(self._metrics), media_type=MEDIA_TYPE)

    @answers({JSON: ServerVersion})
    async def version(self, http: Request) -> Response:
        return json_response(ServerVersion(__version__))

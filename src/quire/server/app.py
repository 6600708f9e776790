"""The HTTP application: which path leads to which endpoint, and the middleware around them."""

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import QuireError
from quire.core.nearest import nearest
from quire.server.access.keys import KeyRing
from quire.server.access.metered import MeteredModels
from quire.server.access.quota import RATE_HEADERS
from quire.server.app_state import AppState
from quire.server.dialects import DIALECTS, load, readers
from quire.server.dialects.dialect import Dialect
from quire.server.dialects.generate import generation_route
from quire.server.dialects.openai.shapes import error_body
from quire.server.errors import MethodNotAllowed, UnknownPath
from quire.server.http.middleware import IGNORED_HEADER, RequestMiddleware
from quire.server.http.openapi import JSON, openapi, responses
from quire.server.http.replies import error_response, json_response
from quire.server.http.wire_format import ErrorShape
from quire.server.observe.metrics import Metrics
from quire.server.observe.tracing import tracer
from quire.server.options import ServerOptions
from quire.server.routes.abort import AbortRoutes
from quire.server.routes.embeddings import EmbeddingRoutes
from quire.server.routes.engine import EngineRoutes
from quire.server.routes.info import InfoRoutes
from quire.server.routes.live import LiveRoutes
from quire.server.routes.page import page_routes
from quire.server.routes.plan import PlanRoutes
from quire.server.routes.rerank import RerankRoutes
from quire.server.routes.tokens import TokenizerRoutes

if TYPE_CHECKING:
    from quire.client.service import Models


def create_app(
    models: "Models", options: ServerOptions, metrics: Metrics | None = None, keys: KeyRing | None = None
) -> Starlette:
    """`metrics`: the observer of the models, if they have one. `keys`: those of the options, if already read."""
    metrics = metrics or Metrics()
    keys = keys or KeyRing(options.api_key, options.keys_file)
    metered = MeteredModels(models)
    table = RouteTable(AppState(metered, options, metrics), metered)
    return Starlette(
        routes=table.routes,
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", IGNORED_HEADER, *RATE_HEADERS],
            ),
            Middleware(
                RequestMiddleware, options, keys, metrics, table.routes, table.error_shapes, error_body, tracer(options)
            ),
        ],
        exception_handlers={HTTPException: table.not_routed},
    )


class RouteTable:
    """All routes, and the shape of errors on each path."""

    def __init__(self, state: AppState, metered: MeteredModels) -> None:
        self.routes: list[Route] = []
        self.error_shapes: dict[str, ErrorShape] = {}  # path -> shape, for paths of a dialect
        self._prefix_shapes: dict[str, ErrorShape] = {}  # path prefix -> shape
        self._readers = readers()
        for dialect in map(load, DIALECTS):  # first: Starlette tries routes in this order
            self._add(dialect, state)
        self.routes += [
            *InfoRoutes(state).routes(),
            *TokenizerRoutes(state).routes(),
            *AbortRoutes(metered, state.options.max_body_bytes).routes(),
            *EngineRoutes(metered).routes(),
            *EmbeddingRoutes(state).routes(),
            *RerankRoutes(state).routes(),
            *LiveRoutes(state).routes(),
            *PlanRoutes(state).routes(),
            *page_routes(),
        ]
        self.routes.append(Route("/openapi.json", self.openapi))

    def _add(self, dialect: Dialect, state: AppState) -> None:
        routes = [
            Route(path, generation_route(state, self._readers[path]), methods=["POST"])
            for path in dialect.parsers
            if self._readers[path][-1][0] is dialect
        ]
        routes += dialect.routes(state)
        self.routes += routes
        self.error_shapes |= dict.fromkeys((route.path for route in routes), dialect.wire.error)
        if dialect.path_prefix:
            self._prefix_shapes[dialect.path_prefix] = dialect.wire.error

    @responses({JSON: dict[str, Any]})
    async def openapi(self, http: Request) -> Response:
        return json_response(openapi(self.routes, self._readers, self.error_shapes, error_body))

    async def not_routed(self, http: Request, error: Exception) -> Response:
        """Starlette found no endpoint for the path and the method."""
        assert isinstance(error, HTTPException)
        path = http.url.path
        shapes = (shape for prefix, shape in self._prefix_shapes.items() if path.startswith(prefix))
        response = error_response(self._not_routed(http, error), self.error_shapes.get(path, next(shapes, error_body)))
        response.headers.update(error.headers or {})
        return response

    def _not_routed(self, http: Request, error: HTTPException) -> QuireError:
        path = http.url.path
        what = f"{http.method} {path}"
        if error.status_code == 405:
            taken = (error.headers or {}).get("Allow", "").replace("GET, HEAD", "GET")
            return MethodNotAllowed(f"{what}: this path does not take {http.method}", f"it takes {taken}")
        if error.status_code == 404:
            return UnknownPath(f"{what}: there is nothing here", self._near(path))
        raise AssertionError(f"unexpected HTTP status {error.status_code}") from error

    def _near(self, path: str) -> str:
        """A hint of what was meant: often `/v1` is in the client's address once too often, or is missing."""
        known = [route.path for route in self.routes if "{" not in route.path and route.path != "/"]
        bare = path.rstrip("/").removeprefix("/v1")
        moved = next((each for each in (bare, f"/v1{bare}") if each != path and each in known), "")
        near = [moved] if moved else nearest(path, known, cutoff=0.75)
        return f"did you mean {near[0]}?" if near else "the routes are listed in docs/http.md"

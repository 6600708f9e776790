"""The HTTP application: which path leads where."""

import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.core.errors import QuireError, UnknownModel
from quire.server.dialects import DIALECTS, load
from quire.server.edge import Edge
from quire.server.errors import MethodNotAllowed, UnknownPath
from quire.server.generate import generation_route
from quire.server.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.replies import error_response, json_response
from quire.server.tokens import Tokens

if TYPE_CHECKING:
    from quire.engine.service import Service


def create_app(service: "Service", options: ServerOptions, metrics: Metrics | None = None) -> Starlette:
    """`metrics` is the observer the service was given, if it was given one."""
    metrics = metrics or Metrics()
    shape = load("openai").error  # for the paths that belong to no dialect
    tokens = Tokens(service, options.max_body_bytes)
    pages = Pages(service, metrics)
    routes = [
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", pages.health),
        Route("/ready", pages.ready),
        Route("/metrics", pages.metrics_text),
        Route("/version", pages.version),
    ]
    for dialect in map(load, DIALECTS):
        for path, parse in dialect.routes.items():
            handle = generation_route(service, dialect, parse, options.max_body_bytes)
            routes.append(Route(path, handle, methods=["POST"]))

    async def refused(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_as_ours(http, error), shape)
        response.headers.update(error.headers or {})
        return response

    return Starlette(
        routes=routes,
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            ),
            Middleware(Edge, options.api_key, metrics, shape, {route.endpoint: route.path for route in routes}),
        ],
        exception_handlers={HTTPException: refused},
    )


def _as_ours(http: Request, error: HTTPException) -> QuireError:
    what = f"{http.method} {http.url.path}"
    if error.status_code == 405:
        return MethodNotAllowed(f"{what}: this path does not take {http.method}")
    if error.status_code == 404:
        return UnknownPath(f"{what}: there is nothing here", "the routes are listed in docs/http.md")
    raise AssertionError(f"unexpected HTTP status {error.status_code}") from error


class Pages:
    """What can be asked about the server."""

    def __init__(self, service: "Service", metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._created = int(time.time())

    async def models(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, http: Request) -> Response:
        name, served = http.path_params["name"], self._service.info.name
        if name != served:
            raise UnknownModel(f"no model `{name}`", f"`{served}` is served here", param="model")
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        info = self._service.info
        return {
            "id": info.name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "max_model_len": info.max_model_len,
        }

    async def health(self, http: Request) -> Response:
        state = self._service.state
        return json_response({"status": state}, 503 if state == "stopped" else 200)

    async def ready(self, http: Request) -> Response:
        state = self._service.state
        return json_response({"status": state}, 200 if state == "ready" else 503)

    async def metrics_text(self, http: Request) -> Response:
        from quire.server.exposition import MEDIA_TYPE, prometheus_text

        return Response(prometheus_text(self._metrics), media_type=MEDIA_TYPE)

    async def version(self, http: Request) -> Response:
        return json_response({"version": __version__})

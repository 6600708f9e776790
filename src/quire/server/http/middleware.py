"""The middleware of every request: id, key, deadline, quota, metrics, log, trace, and errors that no route handles."""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import BadRequest, QueueFull, QuireError, Unavailable
from quire.server.access.keys import KeyRing
from quire.server.access.request_context import RequestContext, begin_request_context
from quire.server.errors import ClientDisconnected, NotAllowed
from quire.server.http.replies import error_response
from quire.server.http.wire_format import ErrorShape
from quire.server.observe.logs import log_request
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions

log = logging.getLogger("quire.server")

# Need no key: probes and scrapers have none.
OPEN_PATHS = frozenset(
    {"/health", "/v1/health", "/health_generate", "/ping", "/ready", "/metrics", "/v2/health/live", "/v2/health/ready"}
)
OPEN_PAGE = re.compile(r"/(page/.*)?")  # GET of the web page, which asks its user for a key
MAX_BODIES = 16  # bodies of maximum size that all requests in flight may hold together
IGNORED_HEADER = "x-quire-ignored"  # parts of the body that have no effect, such as tools that OpenAI would run
CLIENT_CLOSED = 499  # never sent: the status in metrics and logs of a request whose client disconnected

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ADDRESS = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:]+\])(:[0-9]+)?")
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """Each key is a tenant: cached prefixes are shared within a key only."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        keys: KeyRing,
        metrics: Metrics,
        routes: Iterable[Route],
        error_shapes: Mapping[str, ErrorShape],  # by path
        default_shape: ErrorShape,
        trace: Callable[[RequestContext, Headers, int], None] | None = None,
    ) -> None:
        self._app = app
        self._options, self._keys, self._metrics, self._trace = options, keys, metrics, trace
        self._error_shapes, self._default_shape = error_shapes, default_shape
        self._body_bytes = 0  # held by requests in flight
        # Metrics are labelled with paths as declared: clients cannot make up label values.
        self._paths = {route.path for route in routes if "{" not in route.path}
        self._templates: dict[Any, str] = {route.endpoint: route.path for route in routes if "{" in route.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        context = _request_context(scope, headers)
        begin_request_context(context)
        shape = self._error_shapes.get(path, self._default_shape)
        exchange = _Exchange(scope, receive, send, context, shape, self._add_body_bytes)
        try:
            self._check_origin(scope, headers)
            if not _is_open(scope, path):
                context.key = self._keys.find(headers)
                context.deadline = _deadline(context, headers, self._options.request_timeout)
                if scope["method"] == "POST":
                    exchange.enter()
            await self._app(scope, exchange.receive, exchange.send)
        except QuireError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:  # the drain timeout is over; the task ends here
            if exchange.status == CLIENT_CLOSED:
                await exchange.refuse(Unavailable("the server is shutting down", "ask again"))
        except (ClientDisconnected, ClientDisconnect):
            log.debug("client of request %s disconnected", context.id)
        except Exception:
            log.exception("request %s failed", context.id)
            if exchange.status == CLIENT_CLOSED:
                hint = f"its id in the server's log is {context.id}"
                await exchange.refuse(QuireError("the server failed on this request", hint))
        finally:
            self._body_bytes -= context.body_bytes
            exchange.leave()
            self._end(context, headers, self._route(scope, path), exchange.status)
        return None

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A browser sends the request of a page from elsewhere, and then hides the response: for a body of text it does
        not ask before. So such a request is refused here."""
        origin, allowed = headers.get("origin"), self._options.allowed_origins
        if origin is None or scope["method"] in _SAFE_METHODS or "*" in allowed or origin in allowed:
            return
        if not _is_own_origin(origin, headers.get("host", "")):
            raise NotAllowed(
                f"web pages of {origin} may not call this server", "its operator can allow it with --allowed-origins"
            )

    def _add_body_bytes(self, num_bytes: int) -> None:
        self._body_bytes += num_bytes
        limit = MAX_BODIES * self._options.max_body_bytes
        if self._body_bytes > limit:
            raise QueueFull(
                f"the bodies of requests in flight have more than {limit} bytes", "try again later", retry_after=1
            )

    def _route(self, scope: Scope, path: str) -> str:
        return path if path in self._paths else self._templates.get(scope.get("endpoint", ""), "other")

    def _end(self, context: RequestContext, headers: Headers, route: str, status: int) -> None:
        self._metrics.http(route, status, context.error)
        if context.tenant and context.model:
            self._metrics.tenant(context.tenant, context.prompt_tokens, context.output_tokens)
        if self._options.access_log:
            log_request(context, status)
        if self._trace is not None and context.model:
            self._trace(context, headers, status)


class _Exchange:
    """One request and its response as they pass through."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        context: RequestContext,
        shape: ErrorShape,
        add_body_bytes: Callable[[int], None],
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._context, self._shape, self._add_body_bytes = context, shape, add_body_bytes
        self._entered = False
        self.status = CLIENT_CLOSED  # until a response begins

    def enter(self) -> None:
        """Raises OverQuota if its key has too many requests."""
        self._context.enter()
        self._entered = True

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._context.leave()

    async def receive(self) -> Message:
        message = await self._receive()
        if size := len(message.get("body", b"")):
            self._context.body_bytes += size
            self._add_body_bytes(size)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._context.id
            if self._context.ignored:
                headers[IGNORED_HEADER] = ", ".join(self._context.ignored)
            if self._context.key is not None:
                headers.update(self._context.key.quota.headers())
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.leave()  # before the end is sent: a client that sees it may send its next request
        await self._send(message)

    async def refuse(self, error: QuireError) -> None:
        await error_response(error, self._shape)(self._scope, self._receive, self.send)


def _request_context(scope: Scope, headers: Headers) -> RequestContext:
    asked = headers.get("x-request-id", "")
    raw: Any = scope.get("raw_path") or b""
    return RequestContext(
        id=asked if _GOOD_ID.fullmatch(asked) else uuid4().hex,
        method=scope["method"],
        path=raw.decode("latin-1"),  # as it was sent: escapes stay in the log
        client=scope["client"][0] if scope.get("client") else "",
    )


def _deadline(context: RequestContext, headers: Headers, max_seconds: float | None) -> float | None:
    """The server's, or the client's if that is sooner."""
    asked = headers.get("x-request-timeout")
    try:
        seconds = math.inf if asked is None else float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadRequest(f"the header x-request-timeout is {asked!r}", "it is a number of seconds, above 0")
    seconds = min(seconds, max_seconds or math.inf)
    return None if math.isinf(seconds) else context.began + seconds


def _is_own_origin(origin: str, host: str) -> bool:
    """Whether it is the server's own page. A name that is no address proves nothing: its owner can let it lead here."""
    return origin.partition("://")[2] == host and _ADDRESS.fullmatch(host) is not None


def _is_open(scope: Scope, path: str) -> bool:
    return path in OPEN_PATHS or (scope["method"] in ("GET", "HEAD") and bool(OPEN_PAGE.fullmatch(path)))

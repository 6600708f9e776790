"""What every request passes on its way in and out: an id, the key, the quota, the count, the log, and the last net for
failures."""

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
from quire.server.errors import ClientDisconnected
from quire.server.http.replies import error_response
from quire.server.http.wire_format import ErrorShape
from quire.server.observe.logs import log_request
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions

log = logging.getLogger("quire.server")

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})  # for probes and scrapers, which have no key
OPEN_PAGE = re.compile(r"/(page/.*)?")  # the page, which asks for the key; what is posted to / is another matter
MAX_BODIES = 16  # of the longest: what all requests under way may have sent together
CLIENT_CLOSED = 499  # never sent: how a request whose client left is counted

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """Each key is a tenant of its own: prefixes are shared within a key only."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        keys: KeyRing,
        metrics: Metrics,
        routes: Iterable[Route],
        shapes: Mapping[str, ErrorShape],  # path -> how an error looks there
        shape: ErrorShape,  # and elsewhere
        trace: Callable[[RequestContext, Headers, int], None] | None = None,
    ) -> None:
        self._app = app
        self._options, self._keys, self._metrics, self._trace = options, keys, metrics, trace
        self._shapes, self._shape = shapes, shape
        self._body_bytes = 0  # of requests under way
        # Paths as declared: clients cannot make up label values.
        self._fixed = {route.path for route in routes if "{" not in route.path}
        self._open: dict[Any, str] = {route.endpoint: route.path for route in routes if "{" in route.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        context = _context(scope, headers)
        begin_request_context(context)
        way = _Exchange(scope, receive, send, context, self._shapes.get(path, self._shape), self._hold)
        try:
            if not _is_open(scope, path):
                context.key = self._keys.find(headers)
                context.deadline = _deadline(context, headers, self._options.request_timeout)
                if scope["method"] == "POST":
                    way.enter()
            await self._app(scope, way.receive, way.send)
        except QuireError as error:
            await way.refuse(error)
        except asyncio.CancelledError:  # the time to drain is over; the task ends here
            if way.status == CLIENT_CLOSED:
                await way.refuse(Unavailable("the server is shutting down", "ask again"))
        except (ClientDisconnected, ClientDisconnect):
            log.debug("client of request %s left", context.id)
        except Exception:
            log.exception("request %s failed", context.id)
            if way.status == CLIENT_CLOSED:
                hint = f"its id in the server's log is {context.id}"
                await way.refuse(QuireError("the server failed on this request", hint))
        finally:
            self._body_bytes -= context.body_bytes
            way.leave()
            self._end(context, headers, self._route(scope, path), way.status)
        return None

    def _hold(self, num_bytes: int) -> None:
        self._body_bytes += num_bytes
        most = MAX_BODIES * self._options.max_body_bytes
        if self._body_bytes > most:
            raise QueueFull(
                f"the requests under way have more than {most} bytes in their bodies", "try again later", retry_after=1
            )

    def _route(self, scope: Scope, path: str) -> str:
        return path if path in self._fixed else self._open.get(scope.get("endpoint", ""), "other")

    def _end(self, context: RequestContext, headers: Headers, route: str, status: int) -> None:
        self._metrics.http(route, status, context.error)
        if context.tenant and context.model:
            self._metrics.tenant(context.tenant, context.prompt_tokens, context.output_tokens)
        if self._options.access_log:
            log_request(context, status)
        if self._trace is not None and context.model:
            self._trace(context, headers, status)


class _Exchange:
    """What one request sends and is sent, as it passes."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        context: RequestContext,
        shape: ErrorShape,
        hold: Callable[[int], None],
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._context, self._shape, self._hold = context, shape, hold
        self._entered = False
        self.status = CLIENT_CLOSED  # until an answer begins

    def enter(self) -> None:
        """OverQuota if it is one too many for its key."""
        self._context.enter()
        self._entered = True

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._context.release()

    async def receive(self) -> Message:
        message = await self._receive()
        if size := len(message.get("body", b"")):
            self._context.body_bytes += size
            self._hold(size)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            told = MutableHeaders(scope=message)
            told["x-request-id"] = self._context.id
            if self._context.key is not None:
                told.update(self._context.key.quota.headers())
        elif message["type"] == "http.response.body" and not message.get(
            "more_body"
        ):  # whoever sees the end may ask again
            self.leave()
        await self._send(message)

    async def refuse(self, error: QuireError) -> None:
        await error_response(error, self._shape)(self._scope, self._receive, self.send)


def _context(scope: Scope, headers: Headers) -> RequestContext:
    asked = headers.get("x-request-id", "")
    raw: Any = scope.get("raw_path") or b""
    return RequestContext(
        id=asked if _GOOD_ID.fullmatch(asked) else uuid4().hex,
        method=scope["method"],
        path=raw.decode("latin-1"),  # as it was sent: what is escaped in it stays so in the log
        client=scope["client"][0] if scope.get("client") else "",
    )


def _deadline(context: RequestContext, headers: Headers, most: float | None) -> float | None:
    """The server's, or the one the client asks for, if that is sooner."""
    asked = headers.get("x-request-timeout")
    try:
        seconds = math.inf if asked is None else float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise BadRequest(f"the header x-request-timeout is {asked!r}", "it is a number of seconds, above 0")
    seconds = min(seconds, most or math.inf)
    return None if math.isinf(seconds) else context.began + seconds


def _is_open(scope: Scope, path: str) -> bool:
    return path in OPEN_PATHS or (scope["method"] in ("GET", "HEAD") and bool(OPEN_PAGE.fullmatch(path)))

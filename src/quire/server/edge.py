"""What every request passes on its way in and out: an id, the key, the count, and the last net for failures."""

import asyncio
import hmac
import logging
import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import QuireError, Unavailable
from quire.server.errors import ClientGone, Unauthorized
from quire.server.metrics import Metrics
from quire.server.replies import error_response

log = logging.getLogger("quire.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # for probes and scrapers, which have no key
OPEN_PAGE = re.compile(r"/(page/.*)?")  # the page, which asks for the key; what is posted to / is another matter
CLIENT_CLOSED = 499  # never sent: how a request whose client left is counted

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Edge:
    """With several keys, each is a tenant of its own: prefixes are shared within a key only."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: list[str],
        metrics: Metrics,
        error_shape: Callable[[QuireError], object],
        paths: dict[Any, str],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._metrics = metrics
        self._shape = error_shape
        self._paths = paths  # endpoint -> its path as declared: clients cannot make up label values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _GOOD_ID.fullmatch(asked) else uuid4().hex
        status = CLIENT_CLOSED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            if self._keys and not _is_open(scope):
                scope["tenant"] = self._tenant(headers.get("authorization", ""))
            await self._app(scope, receive, send_with_id)
        except QuireError as error:
            await error_response(error, self._shape)(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the time to drain is over; the task ends here
            if status == CLIENT_CLOSED:
                stopping = Unavailable("the server is shutting down", "ask again")
                await error_response(stopping, self._shape)(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            log.debug("client of request %s left", request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if status == CLIENT_CLOSED:  # nothing was sent yet
                failed = QuireError("the server failed on this request", f"its id in the server's log is {request_id}")
                await error_response(failed, self._shape)(scope, receive, send_with_id)
        finally:
            self._metrics.http(self._paths.get(scope.get("endpoint"), "other"), status)
        return None

    def _tenant(self, authorization: str) -> str:
        kind, _, given = authorization.partition(" ")
        key = given.strip().encode("latin-1")  # as headers are decoded: the bytes that were sent
        matches = [hmac.compare_digest(key, known) for known in self._keys]  # all of them, in equal time
        if kind.lower() != "bearer" or not any(matches):
            raise Unauthorized(
                "no valid API key" if given else "no API key was given", "send `Authorization: Bearer <key>`"
            )
        return f"key-{matches.index(True)}"


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or (scope["method"] in ("GET", "HEAD") and bool(OPEN_PAGE.fullmatch(path)))

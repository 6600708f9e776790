"""Responses that are not a generation: plain JSON and errors."""

from collections.abc import Awaitable, Callable
from functools import wraps

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.access.request_context import note_error


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(
    error: QuireError, shape: Callable[[QuireError], object], status: Callable[[QuireError], int] | None = None
) -> Response:
    """In a dialect's shape, and with its status where that differs from ours."""
    note_error(error)
    headers = {}
    if (seconds := getattr(error, "retry_after", None)) is not None:
        headers["retry-after"] = str(seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(shape(error), status(error) if status else error.status, headers)


def with_error_shape(
    endpoint: Callable[[Request], Awaitable[Response]],
    shape: Callable[[QuireError], object],
    status: Callable[[QuireError], int] | None = None,
) -> Callable[[Request], Awaitable[Response]]:
    """A page of a dialect, whose errors are told as that dialect tells them."""

    @wraps(endpoint)
    async def handle(http: Request) -> Response:
        try:
            return await endpoint(http)
        except QuireError as error:
            return error_response(error, shape, status)

    return handle

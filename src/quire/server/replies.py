"""Responses that are not a generation: plain JSON and errors."""

from collections.abc import Callable

import msgspec
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.visit import note_error


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: QuireError, shape: Callable[[QuireError], object]) -> Response:
    note_error(error)
    headers = {}
    if (seconds := getattr(error, "retry_after", None)) is not None:
        headers["retry-after"] = str(seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(shape(error), error.status, headers)

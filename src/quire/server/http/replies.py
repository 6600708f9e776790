"""Responses that are not streamed: JSON and errors."""

from array import array
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest, QuireError
from quire.server.access.request_context import note_error
from quire.server.http.wire_format import ErrorShape, WireFormat

Endpoint = Callable[[Request], Awaitable[Response]]


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def json_vector(vector: "array[float]") -> Any:
    """A list of numbers, as JSON: one vector at a time, as the encoder holds the interpreter."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def error_response(error: QuireError, shape: ErrorShape, status: int | None = None) -> Response:
    """`status`: a dialect's own, if it is not the error's."""
    note_error(error)
    headers = {}
    if (seconds := getattr(error, "retry_after", None)) is not None:
        headers["retry-after"] = str(seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(shape(error), error.status if status is None else status, headers)


def with_wire_errors(endpoint: Endpoint, wire: WireFormat) -> Endpoint:
    """The endpoint, with errors in a dialect's own shape."""

    @wraps(endpoint)
    async def handle(http: Request) -> Response:
        try:
            return await endpoint(http)
        except QuireError as error:
            return error_response(error, wire.error, wire.status(error))
        except RecursionError:  # not too deep for the decoder, but for the chat template or the tokenizer
            nested = BadRequest("the body is nested too deeply")
            return error_response(nested, wire.error, wire.status(nested))

    return handle

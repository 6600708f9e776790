"""Mistakes that only HTTP knows. The others are in `quire.core.errors`."""

from quire.core.errors import BadRequest, QuireError


class Unauthorized(QuireError):
    status, code = 401, "invalid_api_key"


class UnknownPath(QuireError):
    status, code = 404, "not_found"


class MethodNotAllowed(QuireError):
    status, code = 405, "method_not_allowed"


class NotJson(BadRequest):
    status, code = 415, "unsupported_media_type"


class ClientGone(Exception):
    """The client closed the connection. Nobody is left to be told."""

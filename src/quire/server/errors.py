"""Errors of the HTTP server. All others are in `quire.core.errors`."""

import math

from quire.core.errors import BadRequest, QuireError


class Unauthorized(QuireError):
    status, code = 401, "invalid_api_key"


class ModelNotAllowed(QuireError):
    status, code = 403, "model_not_allowed"


class NotAllowed(QuireError):
    status, code = 403, "not_allowed"


class OverQuota(QuireError):
    """`wait`: seconds until a retry can succeed."""

    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, *, wait: float) -> None:
        self.retry_after = max(1, math.ceil(wait))
        super().__init__(message, f"try again in {self.retry_after} s")


class Aborted(QuireError):
    status, code = 409, "aborted"


class UnknownPath(QuireError):
    status, code = 404, "not_found"


class MethodNotAllowed(QuireError):
    status, code = 405, "method_not_allowed"


class NotJson(BadRequest):
    status, code = 415, "unsupported_media_type"


class ClientDisconnected(Exception):
    """The client closed the connection, so there is no response to send."""

"""Errors that the gateway alone has."""

from quire.core.errors import QuireError, Unavailable


class BadUpstream(QuireError):
    status, code = 502, "bad_upstream"


class UpstreamTimeout(QuireError):
    status, code = 504, "upstream_timeout"


class LostPlace(QuireError):
    """A client comes back with a part of its stream, and the gateway has the rest no longer."""

    status, code = 409, "stream_not_found"


class NoWorker(Unavailable):
    """No worker of the model takes requests."""

    retry_after = 2  # seconds: health checks come about as often

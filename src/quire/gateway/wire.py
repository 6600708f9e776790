"""HTTP/1.1 heads as bytes: what is sent to a worker for a request, and to a client for a response.

Every message is framed anew. What one side says about lengths never reaches the other side unchecked."""

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from quire.core.errors import QuireError

Headers = list[tuple[bytes, bytes]]  # names in lower case
JSON = b"application/json"

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
PRIVATE_PREFIX = b"x-quire-"  # headers that a gateway tells its workers; never taken from a client
KEPT_BACK = frozenset({b"x-quire-resume"})  # headers that a worker tells the gateway; never passed to a client

# Of one connection, or written anew.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings content-length host expect".split()
)
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"cookie"})
NOT_PASSED_BACK = HOP_BY_HOP | KEPT_BACK

_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BAD_TARGET = re.compile(rb"[\x00-\x20\x7f]")


class ClientRequest(msgspec.Struct):
    method: str
    target: bytes  # path and query, as sent
    path: str
    headers: Headers
    body: bytes = b""
    keep_alive: bool = True
    is_http10: bool = False
    named: dict[bytes, bytes] = {}  # the first header of each name

    def __post_init__(self) -> None:
        self.named = dict(reversed(self.headers))

    def header(self, name: bytes) -> str:
        """The first of that name, or nothing."""
        return self.named.get(name, b"").decode("latin-1")


def is_clean(target: bytes, headers: Headers) -> bool:
    """Whether nothing in it could be read as the end of a line."""
    return not _BAD_TARGET.search(target) and not _BAD_VALUE.search(b"".join([value for _, value in headers]))


def request_head(
    request: ClientRequest, host: bytes, prefix: bytes, num_body_bytes: int, own: Mapping[bytes, bytes]
) -> bytes:
    """`prefix`: the path that a worker is served under. `own` replaces headers of the same name; an empty one is left
    out."""
    skipped = connection_names(request.headers) if b"connection" in request.named else ()
    lines = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (request.method.encode(), prefix, request.target, host)]
    for name, value in request.headers:
        if name not in HOP_BY_HOP and name not in own and name not in skipped and not name.startswith(PRIVATE_PREFIX):
            lines.append(b"%b: %b\r\n" % (name, value))
    lines += [b"%b: %b\r\n" % header for header in own.items() if header[1]]
    if num_body_bytes or request.method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d\r\n" % num_body_bytes)
    lines.append(b"\r\n")
    return b"".join(lines)


def response_head(status: int, headers: Headers, framing: bytes, keep_alive: bool, extra: Headers) -> bytes:
    """`framing`: `content-length: N`, `transfer-encoding: chunked`, or nothing where closing the connection ends it."""
    skipped = connection_names(headers)
    skipped.update([name for name, _ in extra])
    lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    for name, value in headers:
        if name not in NOT_PASSED_BACK and name not in skipped:
            lines.append(b"%b: %b\r\n" % (name, value))
    lines += [b"%b: %b\r\n" % header for header in extra]
    if framing:
        lines += (framing, b"\r\n")
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def connection_names(headers: Headers) -> set[bytes]:
    """Names that a Connection header lists: they are for this hop only."""
    names: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            names |= {token.strip().lower() for token in value.split(b",")}
    return names


def whole_response(status: int, body: bytes, extra: Headers, keep_alive: bool, media_type: bytes) -> bytes:
    headers = [(b"content-type", media_type)]
    return response_head(status, headers, b"content-length: %d" % len(body), keep_alive, extra) + body


def json_bytes(value: object) -> bytes:
    return msgspec.json.encode(value)


def error_body(path: str, error: QuireError) -> bytes:
    """The body of an error, in the shape of the dialect that the path belongs to."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    kind = _error_type(error.status)
    if path.startswith("/v1/messages"):
        return json_bytes({"type": "error", "error": {"type": kind, "message": message}})
    if path.startswith(("/api/", "/v2/")):
        return json_bytes({"error": message})
    return json_bytes({"error": {"message": message, "type": kind, "param": error.param, "code": error.code}})


def _error_type(status: int) -> str:
    if status in (401, 403):
        return "authentication_error" if status == 401 else "permission_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"

"""HTTP/1.1 for a load generator: connections are kept alive and reused, and bytes are noted with their moments.

The client often shares the machine with the server, so it does little while a stream is in flight: what came is
decoded when the stream has ended."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import EMFILE, ENFILE
from ssl import CERT_NONE, SSLContext, create_default_context
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_REPLY_BYTES = 1 << 28
Piece = tuple[float, bytes]  # the moment it came (time.perf_counter()), and a part of a body


class LoadFailed(Exception):
    """A request that has no answer; the message says why."""


class Unreachable(LoadFailed):
    """There is no connection to the server."""


@dataclass(frozen=True, slots=True)
class Reply:
    sent: float  # time.perf_counter(), before a connection was made or taken
    status: int
    pieces: list[Piece]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class HttpClient:
    """Requests to one server. `url` may have a path, which all paths are appended to."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, verify: bool = True) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.scheme in ("http", "https"), url
        self.url = url
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._ssl = _ssl_context(verify) if parts.scheme == "https" else None
        fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def get(self, path: str) -> Reply:
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: bytes, request_id: str = "") -> Reply:
        return await self._request("POST", path, body, f"X-Request-Id: {request_id}\r\n" if request_id else "")

    async def close(self) -> None:
        for connection in self._open:
            connection.transport.abort()
        await asyncio.gather(*(connection.lost for connection in self._open))

    async def _request(self, method: str, path: str, body: bytes, more: str = "") -> Reply:
        sent = time.perf_counter()
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{more}Content-Length: {len(body)}\r\n\r\n"
        while True:
            connection = self._take_idle()
            reused = connection is not None
            connection = connection or await self._connect()
            try:
                await connection.exchange(head.encode("latin-1") + body)
            except LoadFailed:
                if reused and not connection.response.begun:  # the server closed it while it was idle
                    continue
                raise
            finally:
                self._keep(connection)
            response = connection.response
            return Reply(sent, response.status, response.pieces)

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost.done():
                return connection
        return None

    def _keep(self, connection: "_Connection") -> None:
        if connection.response.keeps_alive and not connection.lost.done():
            self._idle.append(connection)
        else:
            connection.transport.abort()

    async def _connect(self) -> "_Connection":
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self.host, self.port, ssl=self._ssl)
        except OSError as error:
            if error.errno in (EMFILE, ENFILE):
                raise LoadFailed("too many open files for one more connection: give --max-concurrency") from error
            raise Unreachable(f"no server at {self.url}: {error.strerror or error}") from error
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection


def _ssl_context(verify: bool) -> SSLContext:
    context = create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = CERT_NONE
    return context


@dataclass(slots=True)
class _Response:
    status: int = 0
    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    begun: bool = False
    framed: bool = False  # the end of the body is known before the connection closes
    keeps_alive: bool = False


class _Connection(asyncio.Protocol):
    """One request at a time. Methods called `on_...` are the parser's callbacks."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.response = _Response()
        self._ended: asyncio.Future[None] | None = None
        self._moment = 0.0

    async def exchange(self, request: bytes) -> None:
        """Send it, and wait for the end of the response."""
        self.response = _Response()
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._ended
        finally:
            self._ended = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._moment = time.perf_counter()
        response = self.response
        response.begun = True
        response.num_bytes += len(data)
        if response.num_bytes > MAX_REPLY_BYTES:
            self._end(LoadFailed(f"the answer is longer than {MAX_REPLY_BYTES >> 20} MiB"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(LoadFailed(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        response = self.response
        if response.status and not response.framed:
            self._end()
        elif response.begun:
            self._end(LoadFailed("the server broke off in the middle of its answer"))
        else:
            self._end(LoadFailed("the server closed the connection without an answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.response.framed = True

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.response.pieces.append((self._moment, body))

    def on_message_complete(self) -> None:
        self.response.keeps_alive = self._parser.should_keep_alive()
        self._end()

    def _end(self, failure: LoadFailed | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self.response.keeps_alive = False
            self._ended.set_exception(failure)

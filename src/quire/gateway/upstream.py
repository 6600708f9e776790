"""Connections to one worker: kept alive, each with one request at a time; responses are parsed and bounded."""

import asyncio
import ssl
from collections import deque
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import httptools

from quire.gateway.wire import Headers, is_clean

MAX_HEAD_BYTES = 1 << 16  # of a response
MAX_IDLE_SECONDS = 30.0  # less than servers keep idle connections, so that they rarely close one in use
MAX_IDLE_CONNECTIONS = 256
WRITE_TOGETHER = 1 << 16  # a head and a body up to this size are one write


class Sink(Protocol):
    """What takes the response to one request. Exactly one of `response_ended` and `upstream_failed` is called last."""

    def response_began(self, status: int, headers: Headers, length: int | None) -> None: ...

    def response_data(self, data: bytes) -> None: ...

    def response_ended(self) -> None: ...

    def upstream_failed(self, reason: str, is_stale: bool) -> None:
        """`is_stale`: an idle connection was closed before it had a response, so the request may be sent again."""


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._parser: Any = None
        self._transport: asyncio.Transport
        self._sink: Sink | None = None
        self._reused = False
        self._is_paused = False
        self._heard = False  # anything of the response
        self._until_close = False  # no length: the end of the connection ends the response
        self._ended = False
        self._keeps_alive = False
        self._began = False
        self._parts: list[bytes] = []
        self._headers: Headers = []
        self._num_head_bytes = 0
        self.idle_since = 0.0

    def send(self, head: bytes, body: bytes, sink: Sink) -> None:
        self._sink, self._parser = sink, httptools.HttpResponseParser(self)
        self._heard = self._until_close = self._ended = self._began = self._keeps_alive = False
        if len(body) <= WRITE_TOGETHER:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def cancel(self) -> None:
        """Nothing more is wanted: closing tells the worker at once."""
        self._sink = None
        self._transport.abort()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    # -- the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    async def start_tls(self, context: ssl.SSLContext, name: str) -> None:
        loop = asyncio.get_running_loop()
        transport = await loop.start_tls(self._transport, self, context, server_hostname=name)
        assert transport is not None
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        if self._sink is None:
            return
        if self._until_close and exc is None:
            self._finish()
        else:
            reason = "closed the connection in the middle of its response" if self._heard else "closed the connection"
            self._fail(reason)

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # nothing was asked
            self._transport.abort()
            return None
        self._heard = True
        if not self._began:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._flush()
            if not self._ended:
                return self._fail("sent a response that is not HTTP")
            self._until_close = True  # bytes behind the response: the connection is not used again
        if not self._began and self._num_head_bytes > MAX_HEAD_BYTES:
            return self._fail(f"sent headers of more than {MAX_HEAD_BYTES} bytes")
        self._flush()
        if self._ended:
            self._finish()
        return None

    # -- the parser

    def on_message_begin(self) -> None:
        if self._ended:
            raise ValueError("a second response to one request")
        self._headers, self._num_head_bytes = [], 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._began:  # trailers are dropped
            self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim response
        if status > 599 or not is_clean(b"", self._headers):
            raise ValueError("a bad head")
        lengths = [value for name, value in self._headers if name == b"content-length"]
        chunked = any(name == b"transfer-encoding" for name, _ in self._headers)
        self._until_close = not lengths and not chunked and status not in (204, 304)
        length = int(lengths[0]) if lengths and not chunked else None
        self._began = True
        if self._sink is not None:
            self._sink.response_began(status, self._headers, length)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._began:
            self._ended = True
            self._keeps_alive = self._parser.should_keep_alive()  # the parser knows it only here

    def _flush(self) -> None:
        if self._parts and self._sink is not None:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = []
            self._sink.response_data(data)

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        if self._keeps_alive and not self._until_close:
            self._reused = True
            self.resume()  # the last piece may have been too much for its client
            self._pool.put(self)
        else:
            self._transport.close()
        if sink is not None:
            sink.response_ended()

    def _fail(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        self._transport.abort()
        if sink is not None:
            sink.upstream_failed(reason, is_stale=self._reused and not self._heard)


class ConnectionPool:
    def __init__(self, url: str, connect_timeout: float, tls: ssl.SSLContext | None = None, tls_name: str = "") -> None:
        """`tls_name`: that the certificate has to be for, where it is not the host of the url."""
        self.url: SplitResult = urlsplit(url)
        assert self.url.hostname is not None, url
        port = self.url.port
        self.host = self.url.netloc.rpartition("@")[2].encode()
        self.prefix = self.url.path.rstrip("/").encode()
        self._address = (self.url.hostname, port or (443 if self.url.scheme == "https" else 80))
        self._tls, self._tls_name = tls, tls_name or self.url.hostname
        self.connect_timeout = connect_timeout
        self._idle: deque[UpstreamConnection] = deque()
        self._loop = asyncio.get_running_loop()
        self._open: set[UpstreamConnection] = set()

    def take(self) -> UpstreamConnection | None:
        """An idle connection, the last used first; None if a new one has to be made."""
        oldest = self._loop.time() - MAX_IDLE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Raises OSError or TimeoutError."""
        async with asyncio.timeout(self.connect_timeout):
            _, connection = await self._loop.create_connection(lambda: UpstreamConnection(self), *self._address)
            if self._tls is not None:
                # not by create_connection: uvloop's logs a failed handshake as never retrieved if it is cancelled
                await connection.start_tls(self._tls, self._tls_name)
        if not connection.is_open:
            raise ConnectionResetError("closed as soon as it was made")
        self._open.add(connection)
        return connection

    def put(self, connection: UpstreamConnection) -> None:
        if len(self._idle) >= MAX_IDLE_CONNECTIONS or not connection.is_open:
            connection.close()
        else:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

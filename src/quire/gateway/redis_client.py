"""A small client of Redis: one connection, requests in order, answers as they come. No more than the limits need."""

import asyncio
import logging
import ssl
from collections import deque
from typing import Any
from urllib.parse import unquote, urlsplit

log = logging.getLogger("quire.gateway")

MAX_ANSWER_BYTES = 1 << 20
Answer = Any  # int, bytes, None or a list of these


class RedisAway(Exception):
    """Redis does not answer, or answers with an error."""


def redis_problem(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("redis", "rediss") and parts.hostname and (parts.port is None or parts.port > 0)
        good = (good and parts.path.strip("/").isdigit()) or (good and parts.path in ("", "/"))
    except ValueError:
        good = False
    return "" if good else f"`{url.rpartition('@')[2]}` is no address of Redis: write redis://HOST:6379/0"


class RedisClient:
    """Connects when it is needed. After a failure every request fails at once until `retry_seconds` have passed."""

    def __init__(self, url: str, timeout: float, retry_seconds: float = 0.5) -> None:
        self._parts = urlsplit(url)
        self._timeout, self._retry_seconds = timeout, retry_seconds
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._retry_at = 0.0

    async def call(self, *words: str | int | bytes) -> Answer:
        """Raises RedisAway."""
        try:
            async with asyncio.timeout(self._timeout):
                if self._writer is None:
                    await self._connect()
                return await self._send(*words)
        except (OSError, TimeoutError, EOFError) as error:
            self._lose(error)
            raise RedisAway(f"{type(error).__name__}: {error}") from None

    def _send(self, *words: str | int | bytes) -> asyncio.Future[Answer]:
        if self._writer is None:
            raise ConnectionError("the connection was lost")
        self._writer.write(_encode(words))
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting.append(answer)
        return answer

    async def _connect(self) -> None:
        async with self._connecting:
            if self._writer is not None:
                return
            if self._loop.time() < self._retry_at:
                raise ConnectionError("it was away a moment ago")
            tls = ssl.create_default_context() if self._parts.scheme == "rediss" else None
            host, port = self._parts.hostname, self._parts.port or 6379
            reader, self._writer = await asyncio.open_connection(host, port, ssl=tls, limit=MAX_ANSWER_BYTES)
            self._reading = self._loop.create_task(self._read(reader))
            if self._parts.password:
                user = [unquote(self._parts.username)] if self._parts.username else []
                await self._send("AUTH", *user, unquote(self._parts.password))
            if database := self._parts.path.strip("/"):
                await self._send("SELECT", database)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                answer = await _decode(reader)
                waiting = self._waiting.popleft()
                if waiting.done():
                    continue
                if isinstance(answer, RedisAway):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        except (OSError, EOFError, ValueError, IndexError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Close the connection: what is asked on it has no answer that could be told from a later one."""
        if self._writer is not None:
            log.warning("Redis at %s does not answer: %s", self._parts.hostname, error or type(error).__name__)
            self._writer.close()
        self._retry_at = self._loop.time() + self._retry_seconds
        self._writer = None
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            if not each.done():
                each.set_exception(ConnectionError("the connection was lost"))
                each.exception()  # take the exception: nothing may wait for it any more

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()


def _encode(words: tuple[str | int | bytes, ...]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


async def _decode(reader: asyncio.StreamReader) -> Answer:
    """RESP 2. An error is returned, so that one inside of a list does not end the connection."""
    line = await reader.readuntil(b"\r\n")
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+":
            return rest
        case b":":
            return int(rest)
        case b"-":
            return RedisAway(rest.decode("utf-8", "replace"))
        case b"$":
            size = int(rest)
            if not -1 <= size <= MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {size} bytes")
            return None if size < 0 else (await reader.readexactly(size + 2))[:-2]
        case b"*":
            return [await _decode(reader) for _ in range(int(rest))]
    raise ValueError(f"{line[:20]!r} is not RESP")

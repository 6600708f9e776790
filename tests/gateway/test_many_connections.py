"""Thousands of connections, most of them idle, and clients that read slowly: all are served, and memory is bounded."""

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from gateway.gateways import SSE_HEAD, RunningGateway, chunk, event, gateway, wait_for
from trials import LENGTH

pytestmark = [pytest.mark.trial, pytest.mark.timeout(600)]

NUM_IDLE, NUM_ACTIVE = (10_000, 1000) if LENGTH >= 10 else (400, 50)
NUM_EVENTS = 10
NUM_SLOW = 6
MEGABYTE = 1 << 20
ANSWER_BYTES = 32 * MEGABYTE  # that a slow reader would get: more than the buffers of sockets hold


class AsyncUpstream:
    """A worker in the loop of the test: thousands of threads would be too many."""

    def __init__(self, event_bytes: int, num_events: int, pause: float) -> None:
        self._event = chunk(event("x" * event_bytes))
        self._num_events, self._pause = num_events, pause
        self.num_sent = 0  # events
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    body = b'{"data": [{"id": "m"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                await self._stream(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            await closed(writer)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for _ in range(self._num_events):
            writer.write(self._event)
            await writer.drain()
            self.num_sent += 1
            await asyncio.sleep(self._pause)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            await closed(writer)
        await asyncio.sleep(0.05)  # those that read see it, and end


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def request() -> bytes:
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def before(url: str, folder: Path) -> Iterator[RunningGateway]:
    config = f'keep_alive = 600\nsend_timeout = 600\n[[workers]]\nurl = "{url}"\nmax_in_flight = 2000\n'
    with gateway(config, folder=folder) as running:
        yield running


def megabytes(running: RunningGateway) -> float:
    return float(psutil.Process(running.process.pid).memory_info().rss / MEGABYTE)


def test_idle_connections_and_active_ones(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = NUM_IDLE + 2 * NUM_ACTIVE + 200  # an active one is a connection to the worker, too
    if most < needed:
        pytest.skip(f"{most} open files are allowed, and {needed} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def run() -> None:
        upstream = AsyncUpstream(10, NUM_EVENTS, 0.02)
        url = await upstream.start()
        with before(url, tmp_path) as running:
            await asyncio.to_thread(wait_for, lambda: running.metric("worker_ready") == 1)
            empty = megabytes(running)
            idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(NUM_IDLE)]

            async def active() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(request())
                answer = await reader.readuntil(b"0\r\n\r\n")
                await closed(writer)
                return answer

            answers = await asyncio.gather(*(active() for _ in range(NUM_ACTIVE)))
            assert all(answer.count(b"data: ") == NUM_EVENTS + 1 for answer in answers)
            for reader, writer in idle[:: NUM_IDLE // 4]:  # they are served as others are
                writer.write(request())
                assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
            kilobytes = 1024 * (megabytes(running) - empty) / (NUM_IDLE + NUM_ACTIVE)
            assert kilobytes < 24, f"a connection takes {kilobytes:.1f} KB"
            for _, writer in idle:
                await closed(writer)
            await asyncio.to_thread(wait_for, lambda: running.metric("requests_in_flight") == 0)
        await upstream.close()

    asyncio.run(run())


def test_slow_readers_hold_back_their_workers(tmp_path: Path) -> None:
    """What a client does not read is neither read from the worker nor kept."""

    async def run() -> None:
        upstream = AsyncUpstream(64 << 10, ANSWER_BYTES >> 16, 0)
        url = await upstream.start()
        with before(url, tmp_path) as running:
            await asyncio.to_thread(wait_for, lambda: running.metric("worker_ready") == 1)
            empty, slow = megabytes(running), []
            for _ in range(NUM_SLOW):
                client = socket.create_connection(("127.0.0.1", running.port))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(request())
                slow.append(client)
            sent = -1
            while upstream.num_sent > sent:  # until all are full
                sent = upstream.num_sent
                await asyncio.sleep(0.5)
            assert sent << 16 < NUM_SLOW * ANSWER_BYTES * 3 / 4, "the workers wait"
            assert megabytes(running) - empty < NUM_SLOW * 2, "what was sent is in the buffers of sockets"
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(request())
            received = 0
            while data := await reader.read(1 << 20):
                received += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
            assert received > ANSWER_BYTES, "a quick reader is served meanwhile"
            await closed(writer)
            for client in slow:
                client.close()
            await asyncio.to_thread(wait_for, lambda: running.metric("worker_requests_in_flight") == 0)
        await upstream.close()

    asyncio.run(run())

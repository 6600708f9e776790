"""What gateways are measured with: a worker that answers at once, and clients that ask at a rate or without a pause."""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import httptools
import uvloop

RATE = 500  # requests/s at which latency is measured
NUM_CONNECTIONS = 64
NUM_STREAMS = 32
EVENTS_A_STREAM = 2000
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 16}).encode()
STREAM_BODY = BODY.replace(b'"model"', b'"stream": true, "model"', 1)

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 50, "completion_tokens": 16, "total_tokens": 66},
    }
).encode()
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
)


# ---- the worker


class Worker(asyncio.Protocol):
    """Answers at once. A stream is written event by event, as engines do, and as fast as it is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._can_write = asyncio.Event()
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/v1/models":
            self._answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        elif b'"stream": true' in self._body or b'"stream":true' in self._body:
            self._task = asyncio.get_running_loop().create_task(self._stream())
        else:
            self._answer(ANSWER)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    async def _stream(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
        self._transport.write(head)
        for number in range(EVENTS_A_STREAM):
            self._transport.write(chunk)
            await self._can_write.wait()
            if number % 8 == 7:
                await asyncio.sleep(0)  # other streams go on
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._can_write.set()


async def run_worker(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


# ---- the clients


class Client(asyncio.Protocol):
    """One request at a time on one connection."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._done: asyncio.Future[None] | None = None
        self.num_events = 0  # that came, of all streams

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.num_events += body.count(b"\n\n")

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            assert self._parser.get_status_code() == 200, self._parser.get_status_code()
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the connection was closed"))

    def close(self) -> None:
        self._transport.abort()

    async def ask(self, body: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        await self._done


async def connect(url: str) -> Client:
    parts = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(url), parts.hostname, parts.port)
    return client


async def latencies(url: str, seconds: float) -> list[float]:
    """Of requests at a fixed rate: a request that waits for a connection counts from when it was due, or from when the
    timer of the loop fired, which counts whole milliseconds."""
    idle: asyncio.Queue[Client] = asyncio.Queue()
    for _ in range(NUM_CONNECTIONS):
        idle.put_nowait(await connect(url))
    times: list[float] = []

    async def one(due: float) -> None:
        client = await idle.get()
        await client.ask(BODY)
        idle.put_nowait(client)
        times.append(time.perf_counter() - due)

    begin, tasks = time.perf_counter(), []
    for number in range(int(RATE * seconds)):
        due = begin + number / RATE
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
            due = max(due, time.perf_counter())
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return times


async def requests_a_second(url: str, seconds: float) -> float:
    clients = [await connect(url) for _ in range(NUM_CONNECTIONS)]
    end, begin = time.perf_counter() + seconds, time.perf_counter()

    async def loop(client: Client) -> int:
        count = 0
        while time.perf_counter() < end:
            await client.ask(BODY)
            count += 1
        return count

    counts = await asyncio.gather(*map(loop, clients))
    return sum(counts) / (time.perf_counter() - begin)


async def chunks_a_second(url: str, seconds: float) -> float:
    """Of streams that may not have ended by then."""
    clients = [await connect(url) for _ in range(NUM_STREAMS)]
    begin = time.perf_counter()

    async def loop(client: Client) -> None:
        while True:
            await client.ask(STREAM_BODY)

    tasks = [asyncio.create_task(loop(client)) for client in clients]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    rate = sum(client.num_events for client in clients) / (time.perf_counter() - begin)
    for task, client in zip(tasks, clients, strict=True):
        task.cancel()
        client.close()
    failed = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
    if failed:
        raise failed[0]
    return rate


if __name__ == "__main__":
    uvloop.run(run_worker(int(sys.argv[1])))

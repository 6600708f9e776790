"""What a gateway costs: added latency, requests/s, SSE chunks/s, memory and time to start, before a trivial worker.

    python -m benchmarks.gateway                            the gateway on one core, worker and clients on the other
    python -m benchmarks.gateway --seconds 2 --rounds 1
    python -m benchmarks.gateway --beside litellm=http://127.0.0.1:4000 --worker-port 9100

Latency at a fixed rate of requests, sent when they are due whether or not others have ended, directly and through the
gateway in turn; the difference of the quantiles is what the gateway adds. `--beside` measures another gateway, which
has to run, on the first core, and to send requests for the model `m` to `--worker-port`. Gateways that ask their
workers before they start need the worker first: `python -m benchmarks.gateway --run-worker 9100`, until they are ready.

    taskset -c 0 vllm-router --worker-urls http://127.0.0.1:9100 --port 9201 --policy round_robin
    taskset -c 0 smg launch --worker-urls http://127.0.0.1:9100 --port 9202 --policy round_robin"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import httptools
import psutil  # type: ignore[import-untyped]
import uvloop

from benchmarks.load import percentile
from benchmarks.machine import describe, note_others
from benchmarks.processes import interruptible

RATE = 500  # requests/s at which latency is measured
NUM_CONNECTIONS = 64
NUM_STREAMS = 32
EVENTS_A_STREAM = 2000
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 16}).encode()
STREAM_BODY = BODY.replace(b'"model"', b'"stream": true, "model"', 1)
AIMS = {"added_p50_ms": 0.25, "added_p99_ms": 1.0, "requests_s": 2500.0, "chunks_s": 60_000.0, "rss_mb": 70.0}

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
        self._done: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._num_events += body.count(b"\n\n")

    def on_message_complete(self) -> None:
        assert self._done is not None
        assert self._parser.get_status_code() == 200, self._parser.get_status_code()
        self._done.set_result(self._num_events)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the connection was closed"))

    async def ask(self, body: bytes) -> int:
        """-> how many events came"""
        self._parser, self._num_events = httptools.HttpResponseParser(self), 0
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        return await self._done


async def connect(url: str) -> Client:
    parts = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(url), parts.hostname, parts.port)
    return client


async def latencies(url: str, seconds: float) -> list[float]:
    """Of requests at a fixed rate: a request that waits for a connection counts from when it was due."""
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
    clients = [await connect(url) for _ in range(NUM_STREAMS)]
    end, begin = time.perf_counter() + seconds, time.perf_counter()

    async def loop(client: Client) -> int:
        count = 0
        while time.perf_counter() < end:
            count += await client.ask(STREAM_BODY)
        return count

    counts = await asyncio.gather(*map(loop, clients))
    return sum(counts) / (time.perf_counter() - begin)


# ---- the measurement


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over rounds are taken by the reader: rounds are kept."""

    added_p50_ms: float
    added_p99_ms: float
    requests_s: float
    chunks_s: float
    cpu_us_request: float | None = None  # CPU time of the gateway: what neighbours do not change
    cpu_us_chunk: float | None = None
    rss_mb: float | None = None
    ready_s: float | None = None


def measure(url: str, worker: str, seconds: float, process: "subprocess.Popen[str] | None", ready: float) -> Figures:
    uvloop.run(requests_a_second(url, 0.5))  # warm
    direct, through = uvloop.run(latencies(worker, seconds)), uvloop.run(latencies(url, seconds))
    added = [1000 * (percentile(through, q) - percentile(direct, q)) for q in (0.5, 0.99)]
    requests, cpu_request = _with_cpu(process, lambda: uvloop.run(requests_a_second(url, seconds)))
    chunks, cpu_chunk = _with_cpu(process, lambda: uvloop.run(chunks_a_second(url, seconds)))
    rss = psutil.Process(process.pid).memory_info().rss / 1e6 if process else None
    return Figures(*added, requests, chunks, cpu_request, cpu_chunk, rss, ready if process else None)


def _with_cpu(process: "subprocess.Popen[str] | None", run: Callable[[], float]) -> tuple[float, float | None]:
    """-> a rate, and the CPU time of the process for each, in microseconds"""
    before = _cpu_seconds(process)
    begin = time.perf_counter()
    rate = run()
    count = rate * (time.perf_counter() - begin)
    return rate, 1e6 * (_cpu_seconds(process) - before) / count if process else None


def _cpu_seconds(process: "subprocess.Popen[str] | None") -> float:
    times = psutil.Process(process.pid).cpu_times() if process else None
    return times.user + times.system if times else 0.0


def pin(process: "subprocess.Popen[str] | None", core: int) -> None:
    with suppress(AttributeError, OSError):
        cores = sorted(os.sched_getaffinity(0)) if process is None else CORES
        os.sched_setaffinity(process.pid if process else 0, {cores[core % len(cores)]})


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def start(stack: ExitStack, command: list[str], core: int, ready: Callable[[str], bool]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    pin(process, core)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if ready(line):
            return process
    raise SystemExit(f"{command[:4]} has ended:\n{''.join(said)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=URL", help="another gateway that runs")
    parser.add_argument("--worker-port", type=int, default=0, help="where the worker listens (default: any free port)")
    parser.add_argument("--run-worker", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_worker:
        uvloop.run(run_worker(args.run_worker))
    interruptible()
    port = args.worker_port or free_port()
    worker = f"http://127.0.0.1:{port}"
    rounds: dict[str, list[Figures]] = {}
    with ExitStack() as stack:
        own = [sys.executable, "-m", "benchmarks.gateway", "--run-worker", str(port)]
        start(stack, own, 1, lambda line: line == "ready\n")
        urls: list[str] = []
        command = [sys.executable, "-m", "quire.cli.main", "gateway", "--worker", worker, "--port", "0"]
        begin = time.perf_counter()
        process = start(stack, [*command, "--admin-port", "0"], 0, lambda line: bool(_note(urls, line)))
        ready = time.perf_counter() - begin
        pin(None, 1)
        named = {"quire": urls[0], **dict(each.split("=", 1) for each in args.beside)}
        for number in range(args.rounds):
            for name, url in named.items():
                note_others(f"{name}, round {number + 1} of {args.rounds}")
                figures = measure(url, worker, args.seconds, process if name == "quire" else None, ready)
                rounds.setdefault(name, []).append(figures)
                print(
                    f"{name:<12}" + "  ".join(f"{k} {v:.2f}" for k, v in asdict(figures).items() if v is not None),
                    flush=True,
                )
        direct = {
            "requests_s": uvloop.run(requests_a_second(worker, 1.0)),
            "chunks_s": uvloop.run(chunks_a_second(worker, 1.0)),
        }
    print("directly    " + "  ".join(f"{name} {value:.2f}" for name, value in direct.items()))
    shown = {name: [asdict(each) for each in figures] for name, figures in rounds.items()}
    print(json.dumps({"benchmark": "gateway", "machine": describe(), "aims": AIMS, "direct": direct, "rounds": shown}))


def _note(urls: list[str], line: str) -> bool:
    """The first address is the gateway's; the line of the admin listener comes last."""
    if match := re.search(r"gateway of .* on (http://\S+)", line):
        urls.append(match[1])
    return line.strip().startswith("curl")


if __name__ == "__main__":
    main()

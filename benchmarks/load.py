"""Users of a server, each of whom sends the next request when the last has ended, and what they saw.

    python -m benchmarks.load http://127.0.0.1:8000 --users 8 --requests 24 --prompt-tokens 128 --output-tokens 64

Talks OpenAI's /v1/completions, streaming, with prompts of token ids. The client shares the machine with the server, so
it does as little as it can while a stream is under way: it notes when bytes came, and reads them afterwards."""

import argparse
import asyncio
import json
import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import uvloop


class LoadFailed(Exception):
    """The server refused a request, or broke off its answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    num_output: int  # tokens drawn, whatever they are

    def body(self) -> bytes:
        fields = {
            "prompt": self.prompt,
            "max_tokens": self.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream. Times are time.perf_counter()."""

    sent: float
    came: list[float]  # when each piece of text did
    num_prompt: int  # tokens, as the server counts them
    num_output: int

    @property
    def ttft(self) -> float:
        return self.came[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Load:
    answers: list[Answer]
    seconds: float  # from the first request to the end of the last answer

    @property
    def rate(self) -> float:
        """Output tokens a second, over all users."""
        return sum(answer.num_output for answer in self.answers) / self.seconds

    @property
    def pieces_per_token(self) -> float:
        """1 where every token came by itself; below, gaps are longer than the time between tokens."""
        return sum(len(answer.came) for answer in self.answers) / sum(answer.num_output for answer in self.answers)

    def ttft(self, quantile: float) -> float:
        return percentile([answer.ttft for answer in self.answers], quantile)

    def gap(self, quantile: float) -> float:
        return percentile([gap for answer in self.answers for gap in answer.gaps], quantile)


def percentile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least that share of the values do not exceed (so 0.99 of few is the largest)."""
    return sorted(values)[max(0, math.ceil(quantile * len(values)) - 1)]


def run_load(url: str, asks: Iterable[Ask], users: int) -> Load:
    try:
        return uvloop.run(_load(url, asks, users))
    except ExceptionGroup as failures:  # the users' failures; the first tells enough
        raise failures.exceptions[0] from None


async def _load(url: str, asks: Iterable[Ask], users: int) -> Load:
    queue, answers = iter(list(asks)), []

    async def user() -> None:
        for ask in queue:  # whoever is free takes the next
            answers.append(await complete(url, ask))

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return Load(answers, time.perf_counter() - begin)


async def complete(url: str, ask: Ask) -> Answer:
    sent = time.perf_counter()
    return _read_answer(sent, await streamed(url, "/v1/completions", ask.body()))


async def streamed(url: str, path: str, body: bytes) -> list[tuple[float, bytes]]:
    """What is answered on a connection of its own: pieces, each with the moment it came."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    try:
        transport, ear = await asyncio.get_running_loop().create_connection(_Ear, parts.hostname, parts.port)
    except OSError as failure:
        raise LoadFailed(f"nobody listens at {url}: {failure}") from failure
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        transport.write(head.encode() + body)
        await ear.ended
    finally:
        transport.close()
    try:
        status, pieces = _read_response(ear.heard)
    except ValueError as failure:
        raise LoadFailed(f"the server broke off: {failure}") from failure
    if status != 200:
        raise LoadFailed(f"status {status}: {b''.join(piece for _, piece in pieces)[:500].decode(errors='replace')}")
    return pieces


class _Ear(asyncio.Protocol):
    """Notes what comes, and when. No task is woken before the end."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.heard.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _read_response(heard: list[tuple[float, bytes]]) -> tuple[int, list[tuple[float, bytes]]]:
    """The status, and the body's pieces: its chunks if it has some. Raises ValueError if an end is missing."""
    head, _, rest = b"".join(data for _, data in heard).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    status = int(lines[0].split()[1]) if lines[0] else 0
    if not status:
        raise ValueError("nothing was answered")
    begin, ends = len(head) + 4, list(accumulate(len(data) for _, data in heard))
    moments = [moment for moment, _ in heard]
    if not any(line.startswith("transfer-encoding:") and "chunked" in line for line in lines):
        pieces = [data[max(0, begin - end + len(data)) :] for (_, data), end in zip(heard, ends, strict=True)]
        return status, [(moment, piece) for moment, piece in zip(moments, pieces, strict=True) if piece]
    found = []
    at = 0
    while size := int(rest[at : (line := rest.index(b"\r\n", at))].split(b";")[0], 16):
        at = line + 2 + size + 2
        if len(rest) < at:
            raise ValueError("in the middle of a chunk")
        found.append((moments[bisect_left(ends, begin + at)], rest[line + 2 : at - 2]))
    return status, found


def _read_answer(sent: float, pieces: list[tuple[float, bytes]]) -> Answer:
    came, usage = [], None
    for moment, event in events_of(pieces):
        if "error" in event:
            raise LoadFailed(f"the stream ended in {event['error']}")
        usage = event.get("usage") or usage
        if any(choice.get("text") for choice in event.get("choices", [])):
            came.append(moment)
    if not came or usage is None:
        raise LoadFailed("the stream had no text, or no usage at its end")
    return Answer(sent, came, usage["prompt_tokens"], usage["completion_tokens"])


def events_of(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The objects of a stream of server-sent events, each with the moment its last byte came."""
    rest = b""
    for moment, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield moment, json.loads(line[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=30_000, help="prompts are random ids from 100 to this")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    ids = range(100, args.vocab_size)
    asks = [Ask(rng.choices(ids, k=args.prompt_tokens), args.output_tokens) for _ in range(args.requests)]
    load = run_load(args.url, asks, args.users)
    print(
        f"{load.rate:.1f} output tokens/s; "
        f"first token p50 {load.ttft(0.5) * 1e3:.0f} ms, p99 {load.ttft(0.99) * 1e3:.0f} ms; "
        f"between tokens p50 {load.gap(0.5) * 1e3:.1f} ms, p99 {load.gap(0.99) * 1e3:.1f} ms; "
        f"{load.pieces_per_token:.2f} pieces a token"
    )


if __name__ == "__main__":
    main()

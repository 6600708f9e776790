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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


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
        return asyncio.run(_load(url, asks, users))
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
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as failure:
        raise LoadFailed(f"nobody listens at {url}: {failure}") from failure
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        status, chunked = await read_head(reader)
        pieces: list[tuple[float, bytes]] = []
        while piece := await read_piece(reader, chunked):
            pieces.append((time.perf_counter(), piece))
    except (asyncio.IncompleteReadError, ConnectionError) as failure:
        raise LoadFailed(f"the server broke off: {failure}") from failure
    finally:
        writer.close()
    if status != 200:
        raise LoadFailed(f"status {status}: {b''.join(piece for _, piece in pieces)[:500].decode(errors='replace')}")
    return pieces


async def read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the body comes in chunks (else it ends with the connection)."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    return int(lines[0].split()[1]), any(line.startswith("transfer-encoding:") and "chunked" in line for line in lines)


async def read_piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    """The body's next bytes, empty at its end."""
    if not chunked:
        return await reader.read(65536)
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:size]


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

"""Streams while their engine is killed again and again: is any of them lost, and is any token another one?

    python -m benchmarks.kills                       100 streams, a kill -9 every 10 s for 10 minutes, the default model
    python -m benchmarks.kills MODEL --streams 20 --every 2 --seconds 30 --tokens 100

Each stream is read once undisturbed, and then again and again. Told at the end: streams read, how many were lost or
differed (none should), and how long no stream gained a token after a kill."""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from urllib.parse import urlsplit
from uuid import uuid4

from benchmarks.crowd import ROUTE, metrics, read_head, read_piece
from benchmarks.load import events_of
from benchmarks.machine import describe
from benchmarks.own_server import own_server
from benchmarks.processes import Running, interruptible


@dataclass(slots=True)
class Kills:
    """What became of the streams."""

    read: int = 0
    tokens: int = 0
    pauses: list[float] = field(default_factory=list)  # for each kill: the longest time that no stream gained a token
    problems: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # for each stream: the longest time between two of its events
    longest: list[tuple[str, float, float]] = field(default_factory=list)  # request, and from when to when that was
    last_token: float = 0.0

    def gain(self) -> None:
        now = time.monotonic()
        if self.pauses:
            self.pauses[-1] = max(self.pauses[-1], now - self.last_token)
        self.last_token = now


async def read_stream(url: str, number: int, num_tokens: int, kills: Kills) -> list[int]:
    fields = {"prompt": f"Chapter {number}. It was a day", "max_tokens": num_tokens, "ignore_eos": True}
    fields |= {"seed": number, "temperature": 0.8, "stream": True, "return_token_ids": True}
    fields |= {"cache_salt": uuid4().hex}  # the prefix cache has nothing of an earlier reading
    body = json.dumps(fields).encode()
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        head = (
            f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status, chunked, request_id = await read_head(reader)
        pieces: list[tuple[float, bytes]] = []
        longest = (0.0, 0.0)
        while piece := await read_piece(reader, chunked):
            if b"data:" in piece:  # not a comment that keeps the connection alive
                now = time.monotonic()
                if pieces and now - pieces[-1][0] > longest[1] - longest[0]:
                    longest = (pieces[-1][0], now)
                pieces.append((now, piece))
                kills.gain()
        kills.gaps.append(round(longest[1] - longest[0], 3))
        kills.longest.append((request_id, *longest))
        assert status == 200, f"status {status}: {pieces}"
        events = [event for _, event in events_of(pieces)]
        assert "error" not in events[-1], events[-1]
        return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
    finally:
        writer.close()


async def read_all(url: str, num_streams: int, num_tokens: int, kills: Kills | None = None) -> list[list[int]]:
    """`kills`: where gaps are noted."""
    noted = kills or Kills()
    return await asyncio.gather(*(read_stream(url, number, num_tokens, noted) for number in range(num_streams)))


async def read_while_killed(
    url: str, kill: Callable[[], int], undisturbed: list[list[int]], every: float, seconds: float
) -> Kills:
    """`kill` kills, and returns how many."""
    kills, end, rng = Kills(), time.monotonic() + seconds, random.Random(1)

    async def read_until_the_end(number: int) -> None:
        expected = undisturbed[number]
        while time.monotonic() < end:
            try:
                tokens = await read_stream(url, number, len(expected), kills)
                assert tokens == expected, f"{tokens} instead of {expected}"
                kills.read += 1
                kills.tokens += len(tokens)
            except Exception as problem:
                kills.problems.append(f"stream {number}: {type(problem).__name__}: {problem}")
                return

    async def kill_until_the_end() -> None:
        while time.monotonic() + every < end:
            await asyncio.sleep(every * rng.uniform(0.8, 1.2))
            kills.pauses += [0.0] * kill()

    await asyncio.gather(kill_until_the_end(), *map(read_until_the_end, range(len(undisturbed))))
    return kills


def kill_engines(process: Running) -> int:
    engines = [one for one in process.tree() if "quire.engine.process" in one.cmdline()]
    for engine in engines:
        engine.kill()
    return len(engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from kill to kill, give or take a fifth")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tokens", type=int, default=48, help="of a stream")
    args = parser.parse_args()
    interruptible()
    with own_server(args.model) as (url, process):
        undisturbed = asyncio.run(read_all(url, args.streams, args.tokens))
        kill = partial(kill_engines, process)
        kills = asyncio.run(read_while_killed(url, kill, undisturbed, args.every, args.seconds))
        found = metrics(url)
        log = process.said()
    restarts, retried, charged = (
        int(found[f"quire_{name}_total"]) for name in ("engine_restarts", "requests_retried", "requests_charged")
    )
    print(f"{restarts} kills, {kills.read} streams of {args.tokens} tokens were read, {retried} times one was resumed")
    if kills.pauses:
        pauses = sorted(kills.pauses)
        print(f"a kill cost {pauses[len(pauses) // 2]:.1f} s (median), {pauses[-1]:.1f} s (most)")
    print(f"{len(kills.problems)} lost, {charged} charged", *kills.problems[:20], sep="\n  ")
    counts = {"restarts": restarts, "retried": retried, "charged": charged}
    print(json.dumps({"benchmark": "kills", "machine": describe(), **counts, **asdict(kills)}))
    if kills.problems or charged:
        print(log)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

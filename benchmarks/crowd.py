"""A crowd of clients, some of whom leave in the middle: does anything go wrong, and does anything stay behind?

    python -m benchmarks.crowd                       200 streams at a time, 4 rounds of 500 visits, the default model
    python -m benchmarks.crowd MODEL --streams 50 --visits 200 --rounds 2 --seed 3

A visit asks for a stream of 1 to 48 tokens. A third of them leave: while they send the request, before the answer, or
in the middle of it. Told at the end: what went wrong (nothing should), what the server still holds (nothing), how its
memory grew from one round to the next, and whether its metrics add up."""

import argparse
import asyncio
import json
import random
import socket
import struct
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

from benchmarks.load import events_of
from benchmarks.machine import describe
from benchmarks.own_server import own_server
from benchmarks.processes import Running, interruptible

LEAVING = 1 / 3  # of visits
ROUTE = "/v1/completions"
CACHE = "64MiB"  # of keys and values: all of it is touched in the first round, so that what grows later is a leak
PATIENCE = 30.0  # seconds for the server to find out who has left


@dataclass(slots=True)
class Crowd:
    """What became of the visits."""

    whole: int = 0  # had their answer
    left: int = 0
    unseen: int = 0  # of those, gone so soon that the server may never have read what they sent
    tokens: int = 0  # of whole answers
    problems: list[str] = field(default_factory=list)

    @property
    def visits(self) -> int:
        return self.whole + self.left + len(self.problems)


def visit_all(url: str, num_streams: int, num_visits: int, seed: int) -> Crowd:
    return asyncio.run(_visit_all(url, num_streams, num_visits, seed))


async def _visit_all(url: str, num_streams: int, num_visits: int, seed: int) -> Crowd:
    crowd, numbers = Crowd(), iter(range(num_visits))

    async def visitor() -> None:
        for number in numbers:  # whoever is free makes the next visit
            try:
                async with asyncio.timeout(300):
                    await _visit(url, random.Random(f"{seed} {number}"), crowd)
            except Exception as problem:
                crowd.problems.append(f"visit {number}: {type(problem).__name__}: {problem}")

    await asyncio.gather(*(visitor() for _ in range(num_streams)))
    return crowd


async def _visit(url: str, rng: random.Random, crowd: Crowd) -> None:
    asked = rng.randrange(1, 49)
    leaves_after = rng.randrange(-2, asked) if rng.random() < LEAVING else None  # events; -2: in the middle of the body
    fields = {"prompt": f"Chapter {rng.randrange(1000)}. ", "max_tokens": asked, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        head = (
            f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + (body[:9] if leaves_after == -2 else body))
        await writer.drain()
        pieces = []
        if leaves_after is None or leaves_after >= 0:
            status, chunked, _ = await read_head(reader)
            while (leaves_after is None or len(pieces) < leaves_after) and (piece := await read_piece(reader, chunked)):
                pieces.append((0.0, piece))
            assert status == 200, f"status {status}: {pieces}"
        if leaves_after is not None:
            crowd.left += 1
            crowd.unseen += leaves_after < 0
            if rng.random() < 0.5:  # as a process that is killed leaves
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        *_, (_, last) = events_of(pieces)
        assert "error" not in last, last
        assert last["usage"]["completion_tokens"] == asked, f"{asked} were asked for: {last}"
        crowd.whole += 1
        crowd.tokens += asked
    finally:
        writer.transport.abort() if leaves_after is not None and rng.random() < 0.5 else writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, bool, str]:
    """The status, whether the body comes in chunks (else it ends with the connection), and the id of the request."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), "chunked" in headers.get("transfer-encoding", ""), headers.get("x-request-id", "")


async def read_piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    """The body's next bytes, empty at its end."""
    if not chunked:
        return await reader.read(65536)
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:size]


def metrics(url: str) -> dict[str, float]:
    """Ours by name, added up over labels; and the requests to the route."""
    found: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("quire_") and "_bucket" not in line:
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] += float(value)
                if ROUTE in name:
                    found[ROUTE] += float(value)
    return found


def left_behind(url: str, before: dict[str, float], crowds: Sequence[Crowd]) -> list[str]:
    """What is not as it should be once everybody has gone who came since `before`. (Who was unseen in one round may be
    counted in the next.)"""
    made, unseen, whole = (sum(getattr(one, name) for one in crowds) for name in ("visits", "unseen", "whole"))
    end = time.monotonic() + PATIENCE
    while True:
        found = metrics(url)
        wrong = []
        for name in ("quire_num_requests_running", "quire_num_requests_waiting", "quire_kv_cache_usage_ratio"):
            if found[name]:
                wrong.append(f"{name} is {found[name]}")
        visits = found[ROUTE] - before[ROUTE]
        if not made - unseen <= visits <= made:
            wrong.append(f"{visits:.0f} visits were counted, and {made} were made")
        ended, began = (
            found[name] - before[name] for name in ("quire_request_success_total", "quire_request_prompt_tokens_count")
        )
        if not whole <= ended <= made or ended != began:
            wrong.append(f"{ended:.0f} requests ended, {began:.0f} were measured, and {whole} were whole")
        if not wrong or time.monotonic() > end:
            return wrong
        time.sleep(0.1)


def resident(process: Running) -> dict[str, float]:
    """MB of each process."""
    return {
        "engine" if "quire.engine.process" in one.cmdline() else f"server {one.pid}": one.memory_info().rss / 1e6
        for one in process.tree()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--visits", type=int, default=500, help="in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    interruptible()
    with own_server(args.model, "--kv-cache-memory-bytes", CACHE) as (url, process):
        before, sizes = metrics(url), [resident(process)]
        rounds: list[Crowd] = []
        wrong: list[str] = []
        for number in range(args.rounds):
            begin = time.perf_counter()
            crowd = visit_all(url, args.streams, args.visits, seed=args.rounds * args.seed + number)
            seconds = time.perf_counter() - begin
            rounds.append(crowd)
            wrong += crowd.problems + left_behind(url, before, rounds)
            sizes.append(resident(process))
            found = f"{crowd.whole} whole ({crowd.tokens} tokens), {crowd.left} left"
            print(f"{crowd.visits} visits in {seconds:.0f} s: {found}", flush=True)
    for name in sizes[-1]:
        print(f"  {name}: {', '.join(f'{size.get(name, 0):.0f}' for size in sizes)} MB")
    print(f"{len(wrong)} problems", *wrong[:20], sep="\n  ")
    print(
        json.dumps(
            {"benchmark": "crowd", "machine": describe(), "rounds": [asdict(one) for one in rounds], "mb": sizes}
        )
    )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

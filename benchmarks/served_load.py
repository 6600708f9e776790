"""A part of the users of a server, in a process of its own, for `benchmarks.served`.

    echo '{"url": "http://127.0.0.1:8000", "users": 8, "bodies": [...]}' | python -m benchmarks.served_load

A line of stdin is a load, and its answer is a line: when it began and ended (time.perf_counter(), which processes of
one machine share), tokens, chunks with text, and the seconds between two chunks of a stream."""

import asyncio
import json
import os
import sys
import time
from typing import Any

import uvloop

from benchmarks.peers.worker import claim_stdout
from quire.cli.bench.serve.http_client import HttpClient, LoadFailed, Reply
from quire.cli.bench.serve.stream import read_answer


async def load(url: str, path: str, users: int, bodies: list[str]) -> list[Reply]:
    """Each user sends the next body when the last is answered. Answers are read once all have come."""
    client, left, replies = HttpClient(url), iter(bodies), []

    async def user() -> None:
        for body in left:
            replies.append(await client.post(path, body.encode()))

    try:
        await asyncio.gather(*(user() for _ in range(users)))
    finally:
        await client.close()
    return replies


def run(asked: dict[str, Any]) -> dict[str, Any]:
    cpu, begin = time.process_time(), time.perf_counter()
    replies = uvloop.run(load(asked["url"], asked["path"], asked["users"], asked["bodies"]))
    cpu, ended = time.process_time() - cpu, time.perf_counter()
    answers = [read_answer(reply) for reply in replies]
    num_tokens = [answer.num_output for answer in answers]
    if None in num_tokens:
        raise LoadFailed("a stream has no usage at its end")
    return {
        "begin": begin,
        "end": ended,
        "cpu": cpu,
        "tokens": sum(num_tokens),
        "chunks": sum(len(answer.moments) for answer in answers),
        "gaps": [round(gap, 6) for answer in answers for gap in answer.gaps],
    }


def main() -> None:
    answers = claim_stdout()
    os.write(answers, b"\n")
    for line in sys.stdin:
        os.write(answers, json.dumps(run(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()

"""Clients that come, read a little and leave in every way, at workers that answer in every way: nothing is left."""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from pathlib import Path

import pytest

from gateway.gateways import (
    SSE_HEAD,
    Asked,
    Script,
    Upstream,
    answers,
    chunk,
    event,
    gateway,
    response,
    streams,
    wait_for,
)
from trials import LENGTH

RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends RST
NUM_CLIENTS = 150 * LENGTH


def any_way(rng: random.Random) -> Script:
    """Most answers are good; some are refused, broken off or slow."""
    ways = [answers(), streams("a", "b", "c"), streams(*"abcdefgh"), endless, refuses, breaks_off, breaks_off_stream]

    def script(connection: socket.socket, asked: Asked) -> bool:
        return rng.choices(ways, [4, 4, 4, 2, 1, 1, 1])[0](connection, asked)

    return script


def endless(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(SSE_HEAD)
    for _ in range(200):
        connection.sendall(chunk(event("x" * 3000)))
    return False


def refuses(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(response(b"{}", status=503))
    return True


def breaks_off(connection: socket.socket, asked: Asked) -> bool:
    return False


def breaks_off_stream(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(SSE_HEAD + chunk(event("a")))
    return False


async def come_and_go(port: int, rng: random.Random, statuses: "Counter[str]") -> None:
    await asyncio.sleep(rng.random() * 1.5 * LENGTH)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "m", "stream": rng.random() < 0.7, "messages": [], "n": rng.choice([1, 1, 3])}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n"
    sent = head % len(body) + body
    writer.write(sent if rng.random() < 0.9 else sent[: rng.randrange(len(sent))])
    try:
        data = await asyncio.wait_for(reader.read(rng.choice([1, 100, 10_000])), rng.choice([0.01, 1, 1]))
        statuses[data[9:12].decode()] += 1
    except (TimeoutError, ConnectionError):
        statuses["left"] += 1
    if rng.random() < 0.4:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()


@pytest.mark.trial
@pytest.mark.timeout(600)
def test_nothing_is_left_of_a_crowd(tmp_path: Path) -> None:
    rng = random.Random()
    workers = [Upstream(any_way(rng)) for _ in range(3)]
    config = '[[keys]]\nname = "crowd"\nkey = "k"\n[faults]\nhealth_interval = 0.2\nbreaker_seconds = 0.2\n'
    config += "".join(f'[[workers]]\nurl = "{each.url}"\nmax_in_flight = 8\n' for each in workers)
    statuses: Counter[str] = Counter()
    with gateway(config, folder=tmp_path) as running:

        async def crowd() -> None:
            await asyncio.gather(*(come_and_go(running.port, rng, statuses) for _ in range(NUM_CLIENTS)))

        asyncio.run(crowd())
        wait_for(lambda: running.metric("requests_in_flight") == running.metric("queue_requests") == 0)
        counts = ("in_flight", "tokens_in_flight")
        assert not any(worker[count] for worker in running.workers().values() for count in counts)
        assert running.metric("tenant_requests_in_flight") == 0
        wait_for(lambda: running.metric("worker_ready") == 3)
    for worker in workers:
        worker.close()
    assert statuses["200"] > NUM_CLIENTS / 4 and "500" not in statuses, statuses

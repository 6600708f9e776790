"""The load generator against a server that streams what the test says."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.load import Ask, Load, LoadFailed, percentile, run_load

Respond = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def serving(respond: Respond) -> Iterator[str]:
    """A server in a thread that hands every request's body to `respond`."""
    loop = asyncio.new_event_loop()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        await respond(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(on_connection, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def text(value: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": value}]}).encode() + b"\n\n"


def usage(num_prompt: int, num_output: int) -> bytes:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\ndata: [DONE]\n\n"


def begin(writer: asyncio.StreamWriter, status: str = "200 OK", chunked: bool = True) -> None:
    encoding = "Transfer-Encoding: chunked\r\n" if chunked else ""
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\n{encoding}\r\n".encode())


def send(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


async def stream_all(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """As many tokens as were asked for, each in a piece of its own."""
    begin(writer)
    for _ in range(body["max_tokens"]):
        send(writer, text("a"))
    send(writer, usage(len(body["prompt"]), body["max_tokens"]))
    send(writer, b"")
    await writer.drain()


def test_every_request_is_answered_and_counted() -> None:
    asks = [Ask(list(range(number + 1)), 4) for number in range(10)]
    with serving(stream_all) as url:
        load = run_load(url, asks, users=3)
    assert sorted(answer.num_prompt for answer in load.answers) == list(range(1, 11))
    assert all(answer.num_output == len(answer.came) == 4 for answer in load.answers)
    assert load.pieces_per_token == 1
    assert load.rate == pytest.approx(40 / load.seconds)


def test_users_wait_for_their_answers() -> None:
    """Eight requests of three users: never more than three at once, and three at some moment."""
    under_way, most = 0, 0
    all_here = asyncio.Event()

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if most == 3:
            all_here.set()
        await all_here.wait()
        await stream_all(body, writer)
        under_way -= 1

    with serving(respond) as url:
        run_load(url, [Ask([1], 1)] * 8, users=3)
    assert most == 3


def test_times_are_those_of_the_pieces() -> None:
    """The first piece comes at once, the second a while later; an event split in two counts when its end comes."""
    pause = 0.05

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begin(writer)
        send(writer, text("a") + text("b")[:10])
        await writer.drain()
        await asyncio.sleep(pause)
        send(writer, text("b")[10:] + usage(1, 2))
        send(writer, b"")

    with serving(respond) as url:
        load = run_load(url, [Ask([1], 2)], users=1)
    [answer] = load.answers
    assert len(answer.came) == 2
    assert pause / 2 < load.gap(0.5) < load.seconds
    assert load.ttft(0.99) + load.gap(0.99) <= load.seconds


def test_a_body_without_chunks_ends_with_the_connection() -> None:
    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begin(writer, chunked=False)
        writer.write(text("a") + usage(1, 1))

    with serving(respond) as url:
        assert run_load(url, [Ask([1], 1)], users=1).answers[0].num_output == 1


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer, "400 Bad Request", chunked=False)
    writer.write(b'{"error": "too long"}')


async def break_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, text("a"))


async def fail_midway(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, text("a") + b'data: {"error": {"message": "out of memory"}}\n\n')
    send(writer, b"")


@pytest.mark.parametrize(
    ("respond", "words"),
    [(refuse, "status 400.*too long"), (break_off, "broke off"), (fail_midway, "out of memory")],
)
def test_failures_say_what_the_server_said(respond: Respond, words: str) -> None:
    with serving(respond) as url, pytest.raises(LoadFailed, match=words):
        run_load(url, [Ask([1], 4)] * 2, users=2)


def test_nobody_listens() -> None:
    with pytest.raises(LoadFailed, match="nobody listens"):
        run_load("http://127.0.0.1:9", [Ask([1], 1)], users=1)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)
    assert percentile([3.0, 1.0], 0.5) == 1
    assert Load([], 1.0).rate == 0

"""A server in a thread that streams what the test says, or breaks off."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from ssl import SSLContext
from typing import Any

Respond = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def serving(respond: Respond, keep_alive: bool = False, ssl: SSLContext | None = None) -> Iterator[str]:
    """Hands every request's body to `respond`. Connections end with the first answer unless `keep_alive`."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                await respond(json.loads(await reader.readexactly(length) or b"{}"), writer)
                if not keep_alive:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        finally:
            writer.close()

    with listening(on_connection, ssl) as url:
        yield url


@contextmanager
def listening(on_connection: OnConnection, ssl: SSLContext | None = None) -> Iterator[str]:
    """The address, while the block runs."""
    started: Future[tuple[str, Callable[[], object]]] = Future()

    async def listen() -> None:
        server, stop = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=ssl), asyncio.Event()
        address = f"{'https' if ssl else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set_result((address, partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)))
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    address, stop = started.result()
    try:
        yield address
    finally:
        stop()
        thread.join()


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
    """As many tokens as were asked for, each in a chunk of its own."""
    begin(writer)
    for _ in range(body["max_tokens"]):
        send(writer, text("a"))
    send(writer, usage(len(body["prompt"]), body["max_tokens"]))
    send(writer, b"")
    await writer.drain()


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer, "400 Bad Request", chunked=False)
    writer.write(b'{"error": "too long"}')


async def break_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, text("a"))
    writer.close()


async def fail_midway(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin(writer)
    send(writer, text("a") + b'data: {"error": {"message": "out of memory"}}\n\n')
    send(writer, b"")

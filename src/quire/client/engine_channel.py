"""The server's end of the socket to an engine, on the event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator

from quire.engine.messages import FromEngine, ToEngine, decode_from_engine, encode
from quire.ipc.channel import Channel


class EngineChannel:
    """Typed messages in both directions, from one event loop."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end)
        self._inbox: list[bytes] = []
        self._arrived = asyncio.Event()  # a message, or the end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)

    def send(self, message: ToEngine) -> None:
        """Never blocks. Nothing happens if the other end is gone."""
        if not self._channel.ended:
            self._channel.send(encode(message))
            if self._channel.has_unsent:
                self._loop.add_writer(self._channel.fileno(), self._write)

    async def messages(self) -> AsyncIterator[list[FromEngine]]:
        """All that have come, each time some have, until the other end is gone, or `end`."""
        while True:
            while self._inbox:
                inbox, self._inbox = self._inbox, []
                yield [decode_from_engine(message) for message in inbox]
            if self._channel.ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def end(self) -> None:
        """The engine has ended: take its last messages, also if a process that it has started has the socket."""
        if self._channel.fileno() >= 0:
            self._read()
        self._channel.ended = True
        self._arrived.set()

    def finish(self) -> None:
        """Ask the engine to end."""
        self._channel.finish()

    def close(self) -> None:
        if (file := self._channel.fileno()) >= 0:
            self._loop.remove_reader(file)
            self._loop.remove_writer(file)
        self._channel.close()

    def _read(self) -> None:
        if not self._channel.ended:
            self._inbox += self._channel.receive()
            self._arrived.set()
        if self._channel.ended:
            self._loop.remove_reader(self._channel.fileno())

    def _write(self) -> None:
        self._channel.flush()
        if not self._channel.has_unsent:
            self._loop.remove_writer(self._channel.fileno())

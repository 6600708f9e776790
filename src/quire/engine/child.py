"""One engine process, from the outside: started, talked to, noticed when it dies."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import zmq
import zmq.asyncio

from quire.core.errors import EngineFailed
from quire.engine.messages import FromEngine, Start, ToEngine, decode_from_engine, encode


class EngineProcess:
    """`messages()` yields what the engine says and ends when its process has ended, however it ended."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder

    @classmethod
    async def start(cls, start: Start) -> "EngineProcess":
        folder = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by this user only
        address = f"ipc://{folder}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire.engine.process",
            address,
            stdin=asyncio.subprocess.PIPE,  # its end is the sign that this process is gone
            stdout=2,  # whatever it prints is a message for people
            start_new_session=True,  # Ctrl-C is for this process to act on
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self = cls(process, socket, folder)
        await self.send(start)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    async def send(self, message: ToEngine) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a dead engine is noticed by messages()
            await self._socket.send(encode(message))

    async def messages(self) -> AsyncIterator[FromEngine]:
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                received = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait((received, ended), return_when=asyncio.FIRST_COMPLETED)
                if received.done():
                    yield decode_from_engine(received.result())
                    continue
                received.cancel()
                while await self._socket.poll(50):  # its last words
                    yield decode_from_engine(await self._socket.recv())
                return
        finally:
            ended.cancel()

    async def stop(self, patience: float = 5.0) -> None:
        """End the process, kindly first; leave nothing behind."""
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), patience)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._socket.close()
        for path in (self._folder / "engine", self._folder):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_socket() else path.rmdir()

    def death(self) -> EngineFailed:
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return EngineFailed(f"the engine process {how}", "its last words are on standard error")

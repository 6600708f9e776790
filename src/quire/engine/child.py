"""One engine process, from the outside: started, talked to, noticed when it dies."""

import asyncio
import contextlib
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

    def __init__(self, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._socket = socket
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def start(cls, start: Start) -> "EngineProcess":
        folder = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by this user only
        address = f"ipc://{folder}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self = cls(socket, folder)
        try:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "quire.engine.process",
                address,
                stdin=asyncio.subprocess.PIPE,  # its end is the sign that this process is gone
                stdout=2,  # whatever it prints is a message for people
                start_new_session=True,  # Ctrl-C is for this process to act on
            )
            await socket.send(encode(start))  # waits until the process has connected
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def send(self, message: ToEngine) -> None:
        """Never waits: a live engine takes any number of messages, and a dead one is noticed by messages()."""
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send(encode(message), zmq.DONTWAIT)

    async def messages(self) -> AsyncIterator[FromEngine]:
        assert self._process is not None
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
        """End the process, kindly first, at once if this is cancelled; leave nothing behind."""
        process = self._process
        try:
            if process is not None and process.stdin is not None:
                process.stdin.close()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), patience)
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            self._socket.close()
            for path in (self._folder / "engine", self._folder):
                with contextlib.suppress(OSError):
                    path.unlink() if path.is_socket() else path.rmdir()

    def death(self) -> EngineFailed:
        status = self._process.returncode if self._process else None
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return EngineFailed(f"the engine process {how}", "its last words are on standard error")

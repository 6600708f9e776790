"""Stages on other machines, as the engine sees them: connected, told what to do, and watched."""

import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence

from quire.executors.pipeline.greeting import VERSION, FetchHidden, connect, new_greeting
from quire.executors.pipeline.processes import StageProcesses
from quire.executors.ranks.processes import LOOK_INTERVAL, OnLoss, RankProcess
from quire.ipc.channel import Channel


class RemoteStage(RankProcess):
    """A stage that listens at an address."""

    def __init__(self, rank: int, address: str, end: socket.socket) -> None:
        self.rank, self.address = rank, address
        self._end = end
        self.channel = Channel(end)
        self._inbox: deque[bytes] = deque()

    @property
    def where(self) -> str:
        return f"at {self.address}"

    @property
    def is_gone(self) -> bool:
        """Whether it, or its machine, has ended the connection."""
        try:
            return not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class RemoteStages(StageProcesses):
    """All stages but the last, at `addresses`."""

    def __init__(self, addresses: Sequence[str], fingerprint: str, on_loss: OnLoss) -> None:
        self._addresses, self._fingerprint = addresses, fingerprint
        self._session = secrets.token_hex(16)
        super().__init__(len(addresses) + 1, on_loss)

    def _start(self, rank: int, size: int, memory: int) -> RankProcess:
        before = self._addresses[rank - 2] if rank > 1 else ""
        address = self._addresses[rank - 1]
        greeting = new_greeting(self._fingerprint, self._session, rank, size, before)
        stage = RemoteStage(rank, address, connect(address, greeting))
        if rank == size - 1:
            self.last_end = connect(address, FetchHidden(VERSION, self._session))
        return stage

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_INTERVAL):
            for one in self.processes:
                if isinstance(one, RemoteStage) and one.is_gone:
                    self._lose(one, "has ended", 1)
                    return

    def stop(self) -> None:
        if self.last_end is not None:
            with contextlib.suppress(OSError):
                self.last_end.shutdown(socket.SHUT_RDWR)  # the thread that receives closes it
            self.last_end = None
        super().stop()

    def _end(self, timeout: float = 0.0) -> None:
        for one in self.processes:
            one.channel.finish()
        if timeout:
            for one in self.processes:
                one.channel.close()
            with contextlib.suppress(OSError):
                os.close(self._memory)

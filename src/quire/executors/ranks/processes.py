"""The processes of the other ranks: started, told what to do, and watched. One that dies or hangs ends all of them."""

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.core.errors import EngineFailed
from quire.executors.ranks.messages import FromRank, RankFailed, ToRank, decode_from_rank, encode
from quire.ipc.channel import Channel
from quire.ops.ranks.group import RankGroup, new_shared_memory

log = logging.getLogger("quire.engine")

LOOK_INTERVAL = 0.1  # seconds between looks at the ranks
MAX_SILENT_LOOKS = 8  # looks without a beat of a rank's heart, which beats as often: it hangs
MAX_STARVED_LOOKS = 100  # looks without progress, where the rank would run if it got a CPU
STOP_TIMEOUT = 2.0  # seconds that a process has to end

OnLoss = Callable[[int], None] | None


class RankProcess:
    """One rank's process and the socket to it."""

    module = "quire.executors.ranks.follower"

    def __init__(self, rank: int, size: int, memory: int, inherited: Sequence[int] = ()) -> None:
        """`inherited`: more files that it is told of, behind `memory`."""
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._inbox: deque[bytes] = deque()
        with theirs:
            files = [theirs.fileno(), memory, *inherited]
            arguments = [*files, rank, size, os.getpid()]
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *map(str, arguments)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints is for people
                start_new_session=True,  # rank 0's process handles Ctrl-C
            )

    @property
    def where(self) -> str:
        return f"process {self.process.pid}"

    def death(self) -> str:
        status = self.process.returncode
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class HeartbeatCount:
    """The heartbeat of a rank, as it was when it was last looked at."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._beats = self._silent = 0

    def hangs(self, process: int) -> bool:
        """Look again: every LOOK_INTERVAL."""
        beats = self._group.native.beats(self._rank)
        self._silent = self._silent + 1 if beats and beats == self._beats else 0
        self._beats = beats
        return self._silent >= (MAX_STARVED_LOOKS if self._silent and _is_runnable(process) else MAX_SILENT_LOOKS)


class RankProcesses:
    """Ranks 1 and following. `lost` says why the group has ended; None: it has not."""

    member = "rank"

    def __init__(self, size: int, on_loss: OnLoss = None) -> None:
        """`on_loss` is called in a thread, when all are ended, with the exit status of the rank that died, or 1."""
        memory = new_shared_memory()
        self.group = RankGroup(memory, 0, size)
        self.processes = [self._start(rank, size, memory) for rank in range(1, size)]
        self._memory = memory
        self.lost: EngineFailed | None = None
        self._on_loss = on_loss
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start(self, rank: int, size: int, memory: int) -> RankProcess:
        return RankProcess(rank, size, memory)

    # -- messages

    def tell(self, message: ToRank) -> None:
        """All ranks, in this order of calls."""
        data = encode(message)
        for one in self.processes:
            one.channel.send(data)
        for one in self.processes:
            while one.channel.has_unsent and not self.lost:
                select.select([], [one.channel], [], LOOK_INTERVAL)
                one.channel.flush()

    def answers(self) -> list[FromRank]:
        """One answer of every rank. Raises if one has failed, or is gone."""
        answers = [self._answer(one) for one in self.processes]
        for answer in answers:
            if isinstance(answer, RankFailed):
                raise answer.exception()
        return answers

    def _answer(self, one: RankProcess) -> FromRank:
        while not one._inbox:
            if self.lost:
                raise self.lost
            if select.select([one.channel], [], [], LOOK_INTERVAL)[0]:
                one._inbox += one.channel.receive()
                if one.channel.ended and not one._inbox:
                    self._stopping.wait(LOOK_INTERVAL)  # until the watcher knows how it died
        return decode_from_rank(one._inbox.popleft())

    def reason(self) -> EngineFailed:
        """Why the group has ended. It has, or will be found to have."""
        self._watcher.join(1.0)
        return self.lost or EngineFailed(f"a {self.member} is gone")

    # -- watching

    def _watch(self) -> None:
        heartbeats = [HeartbeatCount(self.group, one.rank) for one in self.processes]
        while not self._stopping.wait(LOOK_INTERVAL):
            for one, heartbeat in zip(self.processes, heartbeats, strict=True):
                if one.process.poll() is not None:
                    self._lose(one, one.death(), one.process.returncode)
                    return
                if heartbeat.hangs(one.process.pid):
                    self._lose(one, "hangs: it has no heartbeat", 1)
                    return

    def _lose(self, one: RankProcess, how: str, status: int) -> None:
        if self._stopping.is_set():
            return
        reason = f"{self.member} {one.rank} of {self.group.size} ({one.where}) {how}"
        self.lost = EngineFailed(reason, "its last output is on standard error")
        log.error("%s", reason)
        self.group.native.abort()
        self._end()
        if self._on_loss:
            self._on_loss(status)

    def stop(self) -> None:
        """End all processes. What they share goes with the last of them."""
        self._stopping.set()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        self._end(STOP_TIMEOUT)

    def _end(self, timeout: float = 0.0) -> None:
        for one in self.processes:
            if timeout:
                one.channel.finish()  # asks it to end
        for one in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if timeout:
                    one.process.wait(timeout)
            one.process.kill()  # nothing happens if it has ended
            one.process.wait()
        if timeout:
            for one in self.processes:
                one.channel.close()
            os.close(self._memory)


def _is_runnable(process: int) -> bool:
    """Whether a thread of it has a CPU or waits for one."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{process}/task").iterdir()
        return any((task / "stat").read_text().rpartition(")")[2].split()[0] == "R" for task in tasks)
    return False


def die_like(status: int) -> None:
    """End this process as a rank of it has ended: its parent restarts it, and judges it by how it died."""
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status if status > 0 else 1)

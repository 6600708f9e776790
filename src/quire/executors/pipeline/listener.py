"""`quire stage`: a stage of engines on other machines. It serves one engine at a time, each in a process of its own."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import BadRequest, EngineFailed
from quire.executors.pipeline.greeting import (
    GREETING_TIMEOUT,
    VERSION,
    FetchHidden,
    GreetStage,
    StageRefused,
    StageWelcome,
    connect,
    files_digest,
    parse_address,
    receive_greeting,
    refusal,
    send,
    set_tcp_options,
)
from quire.executors.ranks.processes import LOOK_INTERVAL, HeartbeatCount
from quire.ops.ranks.group import RankGroup, new_shared_memory

log = logging.getLogger("quire.stage")


@dataclass(slots=True)
class _Session:
    """An engine that has greeted, until the stage after this one fetches hidden states."""

    greeting: GreetStage
    control: socket.socket
    before: socket.socket | None

    def close(self) -> None:
        self.control.close()
        if self.before is not None:
            self.before.close()


class StageListener:
    def __init__(self, path: Path, address: str, threads: int) -> None:
        self.path, self._threads = path, threads
        self.fingerprint = files_digest(path)
        try:
            host, port = parse_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise BadRequest(f"{address} cannot be listened on: {error}", "choose another with --listen") from error
        self._listener.settimeout(LOOK_INTERVAL)
        self._session: _Session | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._heartbeats: HeartbeatCount | None = None

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def serve(self) -> None:
        """Until it is interrupted."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    end, _ = self._listener.accept()
                    self._greet(end)
                self._look()
        finally:
            self._end_process()
            self._listener.close()

    def _greet(self, end: socket.socket) -> None:
        """A connection is closed unless it is one of an engine or of a stage."""
        end.settimeout(GREETING_TIMEOUT)
        try:
            set_tcp_options(end)
            match receive_greeting(end):
                case GreetStage() as greeting:
                    self._begin(end, greeting)
                case FetchHidden(version, session) if version == VERSION and self._awaits(session):
                    send(end, StageWelcome())
                    self._start(end)
                case FetchHidden():
                    send(end, StageRefused("the stage serves another engine"))
                    end.close()
                case _:
                    end.close()
        except OSError:
            end.close()

    def _awaits(self, session: str) -> bool:
        return self._session is not None and self._session.greeting.session == session

    def _begin(self, end: socket.socket, greeting: GreetStage) -> None:
        """Leave an engine that was served, and take this one."""
        if refused := refusal(greeting, self.fingerprint):
            send(end, refused)
            end.close()
            return
        self._end_process()
        before = None
        try:
            if greeting.before:
                before = connect(greeting.before, FetchHidden(VERSION, greeting.session), GREETING_TIMEOUT)
        except EngineFailed as error:
            send(end, StageRefused(error.message, error.hint))
            end.close()
            return
        self._session = _Session(greeting, end, before)
        send(end, StageWelcome())

    def _start(self, after: socket.socket) -> None:
        """All connections are there: start the process that computes."""
        session, self._session = self._session, None
        assert session is not None
        memory = new_shared_memory()
        rank, size = session.greeting.rank, session.greeting.size
        self._heartbeats = HeartbeatCount(RankGroup(memory, 0, size), rank)
        ends = [session.control, after, *([session.before] if session.before else [])]
        files = [ends[0].fileno(), memory, *(end.fileno() for end in ends[1:])]
        arguments = [self.path, self._threads, *files, rank, size, os.getpid()]
        for end in ends:
            end.setblocking(True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quire.executors.pipeline.remote_follower", *map(str, arguments)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        for end in ends:
            end.close()
        os.close(memory)
        log.info("stage %d of %d of an engine: process %d", rank, size, self._process.pid)

    def _look(self) -> None:
        """End a process that hangs: its engine notices."""
        if self._process is None or self._heartbeats is None:
            return
        if self._process.poll() is not None:
            log.info("process %d has ended with status %d", self._process.pid, self._process.returncode)
            self._process = None
        elif self._heartbeats.hangs(self._process.pid):
            log.error("process %d hangs: it has no heartbeat", self._process.pid)
            self._end_process()

    def _end_process(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

"""What runs on a node of a Ray cluster: an actor that starts an engine process, and tells how it ended; or one that is
a stage of an engine on another node, as `quire stage` is.

The process talks with the server itself, over TCP, and stages with each other; the actor passes nothing on."""

import contextlib
import platform
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from quire import __version__
from quire.client.engine_process import num_oom_kills, spawn_engine
from quire.core.errors import QuireError
from quire.engine.messages import ErrorInfo
from quire.hub import resolve_model
from quire.ipc.tcp import connect

CONNECT_TIMEOUT = 10.0  # seconds


class NodeFacts(msgspec.Struct):
    """What the server has to know of the node before an engine is started there."""

    host: str
    version: str  # of Quire
    python: str
    now: float  # time.monotonic()
    path: str = ""  # of the model's files
    error: ErrorInfo | None = None  # why there are none


class EngineEnd(msgspec.Struct):
    """How an engine process ended."""

    status: int
    active: list[tuple[str, int]]  # the samples that it worked on
    out_of_memory: bool


class EngineActor:
    """Made by `ray.remote`. One method waits for the end of the process while others are called, so it has two
    threads. Values are encoded messages: what is not Quire's is not decoded."""

    def prepare(self, model: str, revision: str | None) -> bytes:
        """Find the files of the model, downloaded if necessary. -> NodeFacts"""
        facts = NodeFacts(socket.gethostname(), __version__, platform.python_version(), 0.0)
        try:
            facts.path = str(resolve_model(model, revision=revision, progress=False).path)
        except QuireError as error:
            facts.error = ErrorInfo.of(error)
        facts.now = time.monotonic()
        return msgspec.msgpack.encode(facts)

    def listen(self, path: str, threads: int) -> str:
        """Be a stage of the engine that greets it. -> its address"""
        import ray

        from quire.executors.pipeline.listener import StageListener

        listener = StageListener(Path(path), f"{ray.util.get_node_ip_address()}:0", threads)
        threading.Thread(target=listener.serve, name="stage", daemon=True).start()
        return listener.address

    def start(self, host: str, port: int, token: bytes) -> int:
        """Start an engine process that is connected with the server. -> its pid"""
        self._num_oom_kills = num_oom_kills()
        connection = connect(host, port, token, CONNECT_TIMEOUT)
        self._process, self._active_work = spawn_engine(connection)
        return self._process.pid

    def wait(self) -> bytes:
        """-> EngineEnd"""
        status = self._process.wait()
        out_of_memory = -status == signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        return msgspec.msgpack.encode(EngineEnd(status, sorted(self._active_work.read()), out_of_memory))

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()


def decode_facts(message: Any) -> NodeFacts:
    return msgspec.msgpack.decode(message, type=NodeFacts)


def decode_end(message: Any) -> EngineEnd:
    return msgspec.msgpack.decode(message, type=EngineEnd)

"""The engine process: one socket to the server process, and the loop.

Started as `python -m quire.engine.process SOCKET`, the number of a file that it inherits. It lives as long as the other
end is open, so it never outlives the process that started it."""

import math
import os
import select
import signal
import socket
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.encode_request import EncodeRequest
from quire.core.errors import QuireError, Unsupported
from quire.core.request import Request
from quire.engine.adapter_loader import AdapterLoader, load_adapters
from quire.engine.engine import Engine
from quire.engine.messages import (
    Cancel,
    Encode,
    Encoded,
    EngineIdle,
    ErrorInfo,
    Failed,
    FromEngine,
    LiveSnapshot,
    LoadAdapter,
    PrepareGrammars,
    Ready,
    RequestRefused,
    Start,
    StepDone,
    Submit,
    ToEngine,
    UnloadAdapter,
    WatchEngine,
    decode_to_engine,
    encode,
)
from quire.engine.options import SPECULATION
from quire.engine.start import load_tokenizer, local_executor, task_of
from quire.engine.structured_engine import StructuredEngine
from quire.ipc.channel import Channel

TARGET_ITL_MS = 30  # between two tokens of a stream while prompts are computed: first tokens come sooner, too


LAST_WORDS = 1.0  # seconds that they have to leave


def main(file: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    os.set_inheritable(file, False)
    channel = Channel(socket.socket(fileno=file))
    server = _Server(channel)
    try:
        start = server.receive(None)
        if start is None:
            return 0
        assert isinstance(start, Start), start
        _load_and_serve(start, server)
    except Exception as error:
        server.send(Failed(ErrorInfo.of(error)))
        if not isinstance(error, QuireError):
            raise  # our bug: the traceback belongs on stderr
        return 2
    finally:
        channel.close(LAST_WORDS)
    return 0


def _load_and_serve(start: Start, server: "_Server") -> None:
    path, options = Path(start.path), start.options
    if options.target_itl_ms is None:
        options = replace(options, target_itl_ms=TARGET_ITL_MS)
    if task_of(path, options) == "generate":
        engine = Engine(local_executor(path, options), options, lambda: load_tokenizer(path, options))
        assert engine.grammars is not None
        load_adapters(engine, start.adapters, start.restarted, server.send)
        compiling = StructuredEngine(engine, engine.grammars, server.refuse)
        shelf = AdapterLoader(engine, compiling, server.send)
        server.wake_for(compiling.fileno())
        server.wake_for(shelf.fileno())
        server.send(Ready(engine.capacity))
        _serve(compiling, server, StepDone, shelf)
        engine.stop()
    else:
        if options.num_loras:
            raise Unsupported("adapters are for models that continue texts", "leave out enable_lora and lora_modules")
        if options.speculation:
            raise Unsupported("guesses are for models that continue texts", f"leave out {', '.join(SPECULATION)}")
        from quire.engine.encoder_engine import EncoderEngine

        reading = EncoderEngine(path, options)
        server.send(Ready(reading.capacity, reading.task, reading.dimensions))
        _serve(reading, server, Encoded)
        reading.stop()


def _serve(
    engine: Any, server: "_Server", report: type[StepDone] | type[Encoded], shelf: AdapterLoader | None = None
) -> None:
    """Take messages as they come and step while there is work, until the server process is gone.

    The steps of a `StructuredEngine` are sent as `StepDone`, those of an `EncoderEngine` as `Encoded`."""
    while not server.gone:
        events: list[Any] = []
        cancelled = False
        message = server.receive(engine.patience)
        while message is not None:
            match message:
                case Submit(request) | Encode(request):
                    try:
                        engine.submit(request)
                    except QuireError as error:
                        server.refuse(request, error)
                case Cancel(request_id, index):
                    events += engine.cancel(request_id, index)
                    cancelled = True
                case WatchEngine(on):
                    engine.watch(on)
                case LoadAdapter(key, path) if shelf is not None:
                    shelf.load(key, Path(path))
                case UnloadAdapter(key) if shelf is not None:
                    shelf.unload(key)
                case PrepareGrammars():
                    engine.prepare()
            message = server.receive(0.0)
        record = None
        if engine.has_work:
            events += engine.step()
            record = engine.record
        if events or record:
            server.send(report(events, record))
        if (cancelled or events) and record is None and not engine.has_work:
            server.send(EngineIdle(engine.stats()))
        if shelf is not None:
            shelf.tidy()
        if seen := engine.snapshot():
            server.send(LiveSnapshot(seen))


class _Server:
    """The process on the other end of the socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[bytes] = deque()  # that have come
        self._poll = select.poll()

    @property
    def gone(self) -> bool:
        return self._channel.ended

    def wake_for(self, file: int) -> None:
        """`receive` waits no longer when this file can be read from."""
        self._poll.register(file, select.POLLIN)

    def receive(self, patience: float | None) -> ToEngine | None:
        """The next message; None if none comes within that many seconds, if the engine has found work by itself, or if
        the server process is gone."""
        milliseconds = None if patience is None else math.ceil(patience * 1000)
        while not self._messages and not self.gone:
            self._poll.register(self._channel, select.POLLIN | select.POLLOUT * self._channel.behind)
            if self._channel.fileno() not in dict(self._poll.poll(milliseconds)):
                return None
            self._channel.flush()
            self._messages += self._channel.receive()
            if milliseconds is not None:
                break
        return decode_to_engine(self._messages.popleft()) if self._messages and not self.gone else None

    def refuse(self, request: Request | EncodeRequest, problem: Exception) -> None:
        self.send(RequestRefused(request.id, ErrorInfo.of(problem)))

    def send(self, message: FromEngine) -> None:
        self._channel.send(encode(message))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""The engine process: one socket to the server process, and the loop.

Started as `python -m quire.engine.process ADDRESS`. It lives as long as its standard input is open, so it never
outlives the process that started it."""

import signal
import sys
from pathlib import Path

import zmq

from quire.core.errors import QuireError
from quire.core.request import Request, SequenceEvent
from quire.engine.compiling import Compiling
from quire.engine.engine import Engine
from quire.engine.messages import (
    Cancel,
    Failed,
    FromEngine,
    Problem,
    Ready,
    Refused,
    Start,
    Step,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from quire.engine.start import load_tokenizer, local_executor


def main(address: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    context = zmq.Context()
    server = _Server(context, address)
    try:
        start = server.receive(wait=True)
        if start is None:
            return 0
        assert isinstance(start, Start), start
        path, options = Path(start.path), start.options
        engine = Engine(local_executor(path, options), options, lambda: load_tokenizer(path, options))
        server.send(Ready(engine.capacity))
        _serve(engine, server)
        engine.stop()
    except Exception as error:
        server.send(Failed(Problem.of(error)))
        if not isinstance(error, QuireError):
            raise  # our bug: the traceback belongs on stderr
        return 2
    finally:
        context.destroy(linger=1000)
    return 0


def _serve(engine: Engine, server: "_Server") -> None:
    """Take messages as they come and step while there is work, until the server process is gone."""
    assert engine.grammars is not None
    compiling = Compiling(engine.grammars)
    server.wake_for(compiling.fileno())
    while not server.gone:
        events: list[SequenceEvent] = []
        message = server.receive(wait=not engine.has_work)
        while message is not None:
            match message:
                case Submit(request):
                    structured = request.params.structured
                    if structured is not None and engine.grammars.find(structured) is None:
                        compiling.begin(request)
                    else:
                        _submit(request, engine, server)
                case Cancel(request_id, index):
                    if not compiling.cancel(request_id, index):
                        events += engine.cancel(request_id, index)
            message = server.receive(wait=False)
        for compiled in compiling.done():
            if compiled.problem is not None:
                server.send(Refused(compiled.request.id, Problem.of(compiled.problem)))
            elif _submit(compiled.request, engine, server):
                for index in compiled.cancelled:
                    events += engine.cancel(compiled.request.id, index)
        record = None
        if engine.has_work:
            events += engine.step()
            record = engine.record
        if events or record:
            server.send(Step(events, record))


def _submit(request: Request, engine: Engine, server: "_Server") -> bool:
    """Whether it was taken."""
    try:
        engine.submit(request)
    except QuireError as error:
        server.send(Refused(request.id, Problem.of(error)))
        return False
    return True


class _Server:
    """The process on the other end of the socket, and of standard input."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.gone = False
        self._socket = context.socket(zmq.PAIR)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def wake_for(self, file: int) -> None:
        """Let `receive` wait no longer than until this file can be read from."""
        self._poller.register(file, zmq.POLLIN)

    def receive(self, *, wait: bool) -> ToEngine | None:
        """The next message; None if there is none yet, if something else is to be done, or if the server process is
        gone."""
        ready = dict(self._poller.poll(None if wait else 0))
        self.gone = sys.stdin.fileno() in ready  # nothing is ever written there: it has been closed
        return decode_to_engine(self._socket.recv()) if self._socket in ready and not self.gone else None

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

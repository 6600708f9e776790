"""The engine process: one socket to the server process, and the loop.

Started as `python -m quire.engine.process ADDRESS`. It lives as long as its standard input is open, so it never outlives
the process that started it."""

import signal
import sys
from pathlib import Path

import zmq

from quire.core.errors import QuireError
from quire.core.request import SequenceEvent
from quire.engine.engine import Engine
from quire.engine.messages import Cancel, Failed, Problem, Ready, Refused, Start, Step, Submit, decode_to_engine, encode
from quire.engine.start import local_executor


def main(address: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    try:
        start = decode_to_engine(socket.recv())
        assert isinstance(start, Start), start
        engine = Engine(local_executor(Path(start.path), start.options), start.options)
        socket.send(encode(Ready(engine.capacity)))
        _serve(engine, socket)
        engine.stop()
    except Exception as error:
        socket.send(encode(Failed(Problem.of(error))))
        if not isinstance(error, QuireError):
            raise  # our bug: the traceback belongs on stderr
        return 2
    finally:
        context.destroy(linger=1000)
    return 0


def _serve(engine: Engine, socket: "zmq.Socket[bytes]") -> None:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        events: list[SequenceEvent] = []
        ready = dict(poller.poll(0 if engine.has_work else None))
        if sys.stdin.fileno() in ready:
            return  # the server process is gone
        while socket.poll(0):
            match decode_to_engine(socket.recv()):
                case Submit(request):
                    try:
                        engine.submit(request)
                    except QuireError as error:
                        socket.send(encode(Refused(request.id, Problem.of(error))))
                case Cancel(request_id, index):
                    events += engine.cancel(request_id, index)
        if engine.has_work:
            events += engine.step()
            socket.send(encode(Step(events, engine.record)))
        elif events:
            socket.send(encode(Step(events, None)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

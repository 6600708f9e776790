"""An engine process that has been started and waits to be told which model to load.

It takes a while to import what it needs, as does the process that starts it: a command that will want an engine starts
one first, so that both do it at the same time. Hence nothing is imported here that is not needed for that."""

import contextlib
import socket
import subprocess
import sys
from types import TracebackType

PATIENCE = 5.0  # seconds that it has to end


class Spawned:
    """`socket` is one end of a pair; the other end is its own. On leaving `with`, whatever is left of it is gone."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:  # a copy of it is inherited
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever it prints is a message for people
                start_new_session=True,  # Ctrl-C is for this process to act on
            )

    def __enter__(self) -> "Spawned":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()  # the sign to end, if it has not been given
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.process.kill()  # nothing happens to one that has ended
        self.process.wait()

"""An engine process that has been started and waits to be told which model to load.

It takes a while to import what it needs, as does the process that starts it: a command that will want an engine starts
one first, so that both do it at the same time. Hence nothing is imported here that is not needed for that."""

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

PATIENCE = 5.0  # seconds that it has to end


class Spawned:
    """`address` is where it looks for the process that has started it. On leaving `with`, whatever is left of it is
    gone."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quire-"))  # readable by this user only
        self.address = f"ipc://{self.folder}/engine"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.process", self.address],
                stdin=subprocess.PIPE,  # its end is the sign that this process is gone
                stdout=2,  # whatever it prints is a message for people
                start_new_session=True,  # Ctrl-C is for this process to act on
            )
        except BaseException:
            self.tidy()
            raise

    def __enter__(self) -> "Spawned":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.process.kill()  # nothing happens to one that has ended
        self.process.wait()
        self.tidy()

    def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def tidy(self) -> None:
        """Leave nothing of it on the disk."""
        for path in (self.folder / "engine", self.folder):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_socket() else path.rmdir()

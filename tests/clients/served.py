"""`quire serve`, for tests of clients."""

import atexit
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

SECONDS = 60  # that anything may take

_until_the_end = ExitStack()
atexit.register(_until_the_end.close)


@cache
def served(*flags: str) -> str:
    """The address of one with the default model, for all tests: the first that asks starts it, and it ends with them.
    The model is called `smollm2`."""
    return _until_the_end.enter_context(started("--served-model-name", "smollm2", *flags))


@contextmanager
def started(*flags: str) -> Iterator[str]:
    """The address of one with a model and flags of one's own."""
    command = [sys.executable, "-m", "quire.cli.main", "serve", *flags, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.strip().startswith("curl"):
            break
    rest = threading.Thread(target=process.stderr.read, daemon=True)  # or it would wait for somebody to read
    rest.start()
    try:
        address = re.search(r"http://[\d.]+:\d+", "".join(said))
        assert address, "".join(said)
        yield address[0]
    finally:
        process.terminate()
        process.wait(SECONDS)
        rest.join()
        process.stderr.close()

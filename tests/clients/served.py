"""One `quire serve` with the default model, for all tests of clients: started by the first that asks for it."""

import atexit
import re
import subprocess
import sys
import threading
from functools import cache

SECONDS = 60  # that anything may take


@cache
def served(*flags: str) -> str:
    """Its address. It is called `smollm2`, and ends with the tests."""
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0", "--served-model-name", "smollm2", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    atexit.register(_end, process)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.strip().startswith("curl"):
            break
    threading.Thread(target=lambda: [*process.stderr], daemon=True).start()  # type: ignore[misc]
    address = re.search(r"http://[\d.]+:\d+", "".join(said))
    assert address, "".join(said)
    return address[0]


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(SECONDS)

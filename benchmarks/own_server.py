"""`quire serve` in a process of its own, until the block ends."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.processes import EngineDied, Running, running

SECONDS_TO_START = 120.0
_ADDRESS = re.compile(r"^serving .* on (\S+)$", re.MULTILINE)


@contextmanager
def own_server(
    model: str, *flags: str, program: Sequence[str] = ("quire.cli.main", "serve")
) -> Iterator[tuple[str, Running]]:
    """Its address, once it takes requests, and the process."""
    with running([sys.executable, "-m", *program, model, "--port", "0", *flags]) as process:
        while (found := _ADDRESS.search(process.said())) is None:
            process.check()
            if time.perf_counter() > process.started + SECONDS_TO_START:
                raise EngineDied(f"not ready within {SECONDS_TO_START:.0f} s\n{process.said()}")
            time.sleep(0.05)
        yield found[1], process

"""What requests have freed is given back to the system."""

import subprocess
import sys

import pytest

SCRIPT = """
from pathlib import Path
from quire.server.heap import trim

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) // 1024

crowd = [b"x" * 60_000 for _ in range(2000)]
last = [b"x" * 600 for _ in range(2000)]  # lives longer, behind them
del crowd
before = anonymous()
trim()
print(before, anonymous())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_holes_in_the_heap_are_given_back() -> None:
    before, after = map(int, subprocess.check_output([sys.executable, "-c", SCRIPT], text=True).split())
    assert before > 100 and after < before - 80, f"{before} MiB, and {after} after"

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
last = crowd[::20]  # live longer, between the others
del crowd
before = anonymous()
trim()
print(before, anonymous())
"""


THREADS = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from quire.server import heap

heap.share()
with ThreadPoolExecutor(4) as threads:
    kept = list(threads.map(lambda number: [b"x" * 60_000 for _ in range(100)], range(4)))
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_threads_share_one_heap() -> None:
    told = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True).stderr
    assert told.count("Arena") == 1, told


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_holes_in_the_heap_are_given_back() -> None:
    before, after = map(int, subprocess.check_output([sys.executable, "-c", SCRIPT], text=True).split())
    assert before > 100 and after < before - 80, f"{before} MiB, and {after} after"

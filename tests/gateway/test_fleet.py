"""`make fleet`: gateway, two engines, a real Redis and a real Prometheus, checked as a user would see them."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("redis-server", "prometheus", "promtool")
FLAGS = ("--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"it needs {', '.join(NEEDED)}"),
]


def free_base() -> int:
    """The first of a row of free ports."""
    for base in range(21_000, 30_000, 100):
        numbers = [base + offset for offset in (0, 1, 2, 3, 10, 11, 12, 20, 21, 22)]
        try:
            for number in numbers:
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return base
    raise AssertionError("no ports are free")


def test_the_fleet_answers_and_every_panel_of_the_dashboards_has_data(default_model: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "fleet.py"), "--check", "--port", str(free_base()), "--", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    assert len(re.findall(r"SUCCESS: \d+ rules found", done.stdout)) == 2, "promtool takes the alerts"
    [num_queries] = re.findall(r"(\d+) queries of dashboards are good; all", done.stdout)
    assert int(num_queries) > 60

"""Streams over real servers that are killed again and again: every answer is the undisturbed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trials import LENGTH

ROOT = Path(__file__).parents[2]
# At LENGTH 10, the run that the gateway is meant for: 100 streams over 3 servers, one killed every 5 s for 5 minutes.
SHORT = {"servers": 2, "streams": 6, "every": 2.5, "seconds": 5, "tokens": 32}
WHOLE = {"servers": 3, "streams": 100, "every": 5, "seconds": 300, "tokens": 48}


@pytest.mark.slow
@pytest.mark.trial
@pytest.mark.timeout(900)
def test_no_kill_of_a_server_loses_or_changes_a_stream(default_model: Path) -> None:
    flags = [f"--{name}={value}" for name, value in (SHORT if LENGTH < 10 else WHOLE).items()]
    command = [sys.executable, "-m", "benchmarks.gateway_kills", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [figures] = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert figures["pauses"] and figures["read"] >= 6 and not figures["problems"]

"""Nothing that a benchmark starts outlives it."""

import subprocess
import sys
import time

import psutil
import pytest
from benchmarks.engines import Command
from benchmarks.processes import ROOT, EngineDied, MemoryWatch, running, wait_with_peak
from benchmarks.workers import worker

# Starts a child in a session of its own, which ignores SIGTERM, and says its number.
STUBBORN = """
import subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_children_are_ended_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.processes.SECONDS_TO_END", 0.1)
    with pytest.raises(KeyboardInterrupt), running([sys.executable, "-c", STUBBORN], piped=True) as engine:
        assert engine.process.stdout is not None
        child = psutil.Process(int(engine.process.stdout.readline()))
        assert engine.memory() > 1 << 20
        raise KeyboardInterrupt
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert engine.process.returncode is not None


def test_a_worker_that_dies_is_quoted() -> None:
    command = Command([sys.executable, "-c", "raise SystemExit('no such model')"], {})
    with pytest.raises(EngineDied, match="status 1\nno such model"), worker(command):
        pass


def test_memory_counts_what_is_used() -> None:
    code = "x = bytearray(50 << 20); x[::4096] = b'1' * (len(x) // 4096); print(flush=True); input()"
    with running([sys.executable, "-c", code], piped=True) as engine, MemoryWatch(engine) as memory:
        assert engine.process.stdout is not None
        engine.process.stdout.readline()
    assert memory.peak > 50 << 20


def test_an_interrupted_run_leaves_no_server(default_model: object) -> None:
    """SIGTERM to the whole benchmark while a server is up."""
    words = [sys.executable, "-m", "benchmarks.serving", "--engines", "quire", "--rounds", "1"]
    run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root, family = psutil.Process(run.pid), []
    end = time.monotonic() + 30
    while len(family) < 2 and time.monotonic() < end:  # the server, and its engine
        family = root.children(recursive=True)
        time.sleep(0.01)
    run.terminate()
    assert run.wait(30) != 0
    _, left = psutil.wait_procs(family, 5)
    assert len(family) >= 2 and not left


def test_the_peak_of_a_process_is_its_own() -> None:
    """The kernel counts what its parent held when it was started, too, for one that has ended."""
    held = b"x" * (300 << 20)
    process = subprocess.Popen([sys.executable, "-c", "import time; x = b'x' * (64 << 20); time.sleep(0.5)"])
    used, peak = wait_with_peak(process)
    assert process.returncode == 0 and used.ru_maxrss * 1024 > len(held)
    assert 64 << 20 < peak < 200 << 20

"""What a result was measured on."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.processes import progress
from quire import __version__

IDLE = 0.05  # of all cores, what others may use without spoiling a measurement


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "quire": __version__,
        "commit": _commit(),
        "load": os.getloadavg()[0],  # others at work here make the figures worthless
    }


def gpu() -> str:
    """Its name and its driver's version, as nvidia-smi says them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "no GPU"
    return ", driver ".join(done.stdout.splitlines()[0].split(", ")) if done.returncode == 0 else "no GPU"


def installed(python: Path, *names: str) -> dict[str, str]:
    """Versions of those of these distributions that an interpreter has; nothing where there is no interpreter."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "versions = {d.name: d.version for d in m.distributions()}\n"
        "print(json.dumps({n: versions[n] for n in sys.argv[1:] if n in versions}))"
    )
    try:
        done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    except OSError:
        return {}
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _cpu_model() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
    return named[0] if named else platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def note_others(what: str, seconds: float = 0.5) -> float:
    """Say what is measured next, and what share of this machine somebody else is using; a share from 0 to 1."""
    busy: float = psutil.cpu_percent(seconds) / 100
    progress(what if busy <= IDLE else f"{what} (others use {busy:.0%} of this machine: the figures will be too low)")
    return busy

"""The number of CPUs that this process may use."""

import os
from math import floor
from pathlib import Path

SPARE_ONE_FROM = 12  # CPUs; measured with 16


def compute_threads(root: Path = Path("/")) -> int:
    """The threads of a step: all CPUs but, from SPARE_ONE_FROM on, one, which the server, masks and the system use.

    15 of 16 CPUs are as fast. With 16 threads, other work would delay one of them, and all wait for it at barriers."""
    cpus = available_cpus(root)
    return cpus - 1 if cpus >= SPARE_ONE_FROM else cpus


def available_cpus(root: Path = Path("/")) -> int:
    """The CPUs of the affinity mask, or fewer where a control group grants less time than that. At least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min(_quotas(root), default=float(cpus))
    return max(1, min(cpus, floor(quota)))


def _quotas(root: Path) -> list[float]:
    """The CPU quotas, in CPUs, of the control groups of this process that have one."""
    groups = _read(root / "proc/self/cgroup").splitlines()
    quotas = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree, limits apply to all below
            mount, limit = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, limit = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        group = Path(path.lstrip("/"))
        for directory in (mount / group, *(mount / parent for parent in group.parents)):
            if (quota := limit(directory)) is not None:
                quotas.append(quota)
    return quotas


def _quota_v2(directory: Path) -> float | None:
    words = _read(directory / "cpu.max").split()  # "max 100000" or "150000 100000"
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(directory: Path) -> float | None:
    quota, period = _read(directory / "cpu.cfs_quota_us").strip(), _read(directory / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # no such group, or no such system

"""Sockets, NUMA nodes and GPUs of this machine, as the system lists them, and what that says about ranks."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from quire.cli.machine import read


@dataclass(frozen=True, slots=True)
class Topology:
    sockets: int
    nodes: tuple[int, ...]  # of each NUMA node: its CPUs that this process may use
    gpus: tuple[str, ...]

    @property
    def tensor_parallel_size(self) -> int:
        """One rank for each NUMA node whose CPUs may be used: its weights are then in memory of its own."""
        return max(1, sum(1 for cpus in self.nodes if cpus))

    @property
    def advice(self) -> str:
        if self.tensor_parallel_size > 1:
            return f"-tp {self.tensor_parallel_size}: a rank for each NUMA node"
        return "-tp 1: all CPUs share one memory"


def topology(root: Path = Path("/")) -> Topology:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    packages = {
        read(path).strip() for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    }
    lists = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    nodes = tuple(len(allowed & _cpus(read(path))) for path in lists)
    return Topology(max(1, len(packages)), nodes or (len(allowed),), _gpus(root))


def _cpus(text: str) -> set[int]:
    """`0-3,8`"""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _gpus(root: Path) -> tuple[str, ...]:
    """Their models, as NVIDIA's driver lists them."""
    infos = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = (re.search(r"^Model:\s*(.+)$", read(path), re.MULTILINE) for path in infos)
    return tuple(model[1].strip() if model else "unknown" for model in models)

"""What this machine has: usable cores and memory, vector units. Read from the system, not measured."""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Vector units a CPU kernel can be written for, as /proc/cpuinfo calls them.
_ARM_UNITS = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
_X86_UNITS = ("avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
_ARM_PARTS = {  # implementer, part -> core
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0xc0", "0xac3"): "Ampere-1",
}
_UNLIMITED = 1 << 60  # bytes; cgroup version 1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True)
class Cores:
    installed: int
    allowed: int  # by the affinity mask
    quota: float | None  # CPUs a container may use on average

    @property
    def usable(self) -> int:
        return max(1, min(self.allowed, int(self.quota) if self.quota is not None else self.allowed))


@dataclass(frozen=True, slots=True)
class MachineMemory:
    total: int  # bytes
    available: int  # bytes that can be had without swapping, within the container's limit
    limit: int | None  # bytes a container may use


def cpu_model(cpuinfo: str) -> str:
    values = _values(cpuinfo)
    if name := values.get("model name"):
        return name
    if name := _ARM_PARTS.get((values.get("CPU implementer", ""), values.get("CPU part", ""))):
        return name
    if platform.system() == "Darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor()
    return platform.processor() or platform.machine()


def vector_units(cpuinfo: str) -> list[str]:
    """The vector extensions of this CPU that kernels may use."""
    values = _values(cpuinfo)
    flags = (values.get("Features") or values.get("flags") or "").split()
    return [unit for unit in (*_ARM_UNITS, *_X86_UNITS) if unit in flags]


def cores(root: Path = Path("/")) -> Cores:
    return Cores(os.cpu_count() or 1, len(_allowed_cpus()), _cpu_quota(root))


def _allowed_cpus() -> set[int]:
    """The CPUs that the affinity mask of this process allows."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class NumaNode:
    """CPUs with memory of their own: other nodes' is slower for them."""

    cpus: int  # that this process may use
    memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of this machine, each of which can compute a part of a model, or a copy of it."""

    sockets: int
    nodes: list[NumaNode]
    gpus: list[str]  # names

    @property
    def tensor_parallel_size(self) -> int:
        """One rank for each NUMA node whose CPUs may be used: its weights are then in memory of its own."""
        return max(1, sum(1 for node in self.nodes if node.cpus))

    @property
    def advice(self) -> str:
        size, gpus = self.tensor_parallel_size, len(self.gpus)
        text = "-tp 1: all CPUs share one memory"
        if size > 1:
            text = f"try --data-parallel-size {size}, -tp {size} or -pp {size}: an engine, a rank or a stage for each "
            text += "NUMA node"
        if gpus > 1:
            text += (
                f"; an engine on each GPU with --data-parallel-size {gpus}, or a larger model on all with -tp {gpus} "
                f"or -pp {gpus}"
            )
        return text + "; models larger than a GPU with --offload-weights or --cpu-layers" if gpus else text

    @property
    def pipeline_parallel_size(self) -> int:
        """One stage for each NUMA node, as with ranks: of many users, stages send less to each other."""
        return self.tensor_parallel_size


def devices(root: Path = Path("/")) -> Devices:
    system, allowed = root / "sys/devices/system", _allowed_cpus()
    packages = {read(path).strip() for path in system.glob("cpu/cpu[0-9]*/topology/physical_package_id")}
    nodes = [
        NumaNode(len(allowed & _cpus(read(path / "cpulist"))), _kilobytes(read(path / "meminfo"), "MemTotal:"))
        for path in sorted(system.glob("node/node[0-9]*"))
    ]
    names = [_values(read(path)).get("Model", "unknown") for path in _gpu_files(root)]
    return Devices(max(len(packages), 1), nodes, names)


def _gpu_files(root: Path) -> list[Path]:
    return sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))


def _cpus(cpulist: str) -> set[int]:
    """CPUs of a list such as 0-3,8."""
    ranges = [part.split("-") for part in cpulist.strip().split(",") if part]
    return {cpu for each in ranges for cpu in range(int(each[0]), int(each[-1]) + 1)}


def _kilobytes(text: str, name: str) -> int:
    """-> bytes"""
    words = text.split()
    return int(words[words.index(name) + 1]) * 1024 if name in words else 0


def memory(root: Path = Path("/")) -> MachineMemory:
    total, available = _system_memory(root)
    limit, used = _memory_limit(root)
    if limit is None or limit >= total:
        return MachineMemory(total, available, None)
    return MachineMemory(total, max(0, min(available, limit - used)), limit)


def read(path: Path) -> str:
    """The file's text; nothing where there is no such file, as on other systems or outside a container."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _values(cpuinfo: str) -> dict[str, str]:
    """`name : value` lines of the first processor."""
    first = cpuinfo.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _groups(root: Path) -> list[Path]:
    """The control groups this process is in, the innermost first: each may set a limit, and the tightest counts."""
    base = root / "sys/fs/cgroup"
    entries = (line.split(":", 2) for line in read(root / "proc/self/cgroup").splitlines())
    inner = next((path for number, _, path in entries if number == "0"), "/")  # version 2 has a single tree
    group = base / inner.strip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(base))]


def _cpu_quota(root: Path) -> float | None:
    limits = [read(group / "cpu.max").split() for group in _groups(root)]
    old = root / "sys/fs/cgroup/cpu"  # version 1
    limits.append([*read(old / "cpu.cfs_quota_us").split(), *read(old / "cpu.cfs_period_us").split()])
    quotas = [
        int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and limit[0].isdigit()
    ]  # not "max", -1
    return min(quotas, default=None)


def _system_memory(root: Path) -> tuple[int, int]:
    meminfo = _values(read(root / "proc/meminfo"))
    if "MemTotal" in meminfo:
        total = int(meminfo["MemTotal"].split()[0]) * 1024
        return total, int(meminfo.get("MemAvailable", meminfo["MemTotal"]).split()[0]) * 1024
    total = int(_sysctl("hw.memsize") or 0)
    return total, total  # macOS tells no such number cheaply


def _memory_limit(root: Path) -> tuple[int | None, int]:
    """-> (limit, used) bytes of the group that leaves the least. Cached file pages are reclaimable: not used."""
    names = [(group, "memory.max", "memory.current", "inactive_file") for group in _groups(root)]
    old = root / "sys/fs/cgroup/memory"  # version 1
    names.append((old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    limits = []
    for group, limit_file, used_file, cached in names:
        limit, used = read(group / limit_file).strip(), read(group / used_file).strip()
        if limit.isdigit() and int(limit) < _UNLIMITED and used.isdigit():
            stat = dict(line.split() for line in read(group / "memory.stat").splitlines())
            limits.append((int(limit), max(0, int(used) - int(stat.get(cached, 0)))))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

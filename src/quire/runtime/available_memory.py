"""How much main memory this process may still use."""

import os
from pathlib import Path

CGROUP_V2 = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
CGROUP_V1 = (
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Bytes: what the machine has free, or less where a container's limit is nearer."""
    room = [_machine()]
    for limit, usage in (CGROUP_V2, CGROUP_V1):
        if (maximum := _number(limit)) is not None and (used := _number(usage)) is not None:
            room.append(max(maximum - used, 0))
    return min(room)


def _machine() -> int:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the size of the machine is the best that is known
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    """The number in the file; None where there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

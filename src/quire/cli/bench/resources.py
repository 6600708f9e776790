"""Peak memory and energy of a benchmark, where they can be read; else the reason why not."""

import ctypes
import os
import resource
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.cli.machine import read

SECONDS_BETWEEN_READINGS = 30.0  # RAPL's counters wrap around after minutes
POWERCAP = Path("/sys/class/powercap")
_GIB = 1 << 30


class NotReadable(Exception):
    """The reason."""


class CpuEnergy:
    """Joules of the CPU packages, by Intel's and AMD's RAPL counters."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._zones = [zone for zone in sorted(powercap.glob("*:*")) if _is_package(zone)]
        if not self._zones:
            raise NotReadable(f"{powercap} has no RAPL counters")
        self._ranges = [_number(zone / "max_energy_range_uj") for zone in self._zones]
        self._last = self._read()
        self.joules = 0.0

    def update(self) -> None:
        now = self._read()
        for before, after, limit in zip(self._last, now, self._ranges, strict=True):
            self.joules += (after - before if after >= before else after - before + limit) / 1e6
        self._last = now

    def _read(self) -> list[int]:
        return [_number(zone / "energy_uj") for zone in self._zones]


def _is_package(zone: Path) -> bool:
    """`intel-rapl:0`: not its parts (`intel-rapl:0:0`), and not the whole platform, which has it in it."""
    return zone.name.count(":") == 1 and read(zone / "name").strip().startswith("package")


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        reason = "only root may read it" if isinstance(error, PermissionError) else str(error)
        raise NotReadable(f"{path}: {reason}") from error


class GpuCounters:
    """NVML, of the GPUs that CUDA_VISIBLE_DEVICES names, else of all."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:
            raise NotReadable(f"there is no {library}") from None
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = [self._device(index) for index in _visible(count.value)]
        if not self._devices:
            raise NotReadable("NVML has no GPU")
        self.peak_used = self.used
        self.no_energy = ""  # why
        try:
            self._first = self._energy()
        except NotReadable as reason:
            self.no_energy = str(reason)

    def update(self) -> None:
        self.peak_used = max(self.peak_used, self.used)

    @property
    def joules(self) -> float | None:
        return None if self.no_energy else (self._energy() - self._first) / 1e3

    @property
    def used(self) -> int:
        """Bytes, of all processes."""
        total = 0
        for device in self._devices:
            memory = (ctypes.c_ulonglong * 3)()  # total, free, used
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            total += memory[2]
        return total

    def _energy(self) -> int:
        """Millijoules since the driver was loaded."""
        total = 0
        for device in self._devices:
            energy = ctypes.c_ulonglong()
            self._call("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(energy))
            total += energy.value
        return total

    def _device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._nvml, name, None)
        status = function(*arguments) if function else "nothing: there is no such function"
        if status != 0:
            raise NotReadable(f"{name} returned {status}")


def _visible(count: int) -> Sequence[int]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(name) for name in named if int(name) < count] if all(name.isdigit() for name in named) else range(count)


class Resources:
    """Watches from its making on; `figures()` ends it."""

    def __init__(self, powercap: Path = POWERCAP, nvml: str = "libnvidia-ml.so.1") -> None:
        self.reasons: dict[str, str] = {}
        self._cpu = self._attempt(("cpu_energy_joules",), lambda: CpuEnergy(powercap))
        self._gpu = self._attempt(("gpu_energy_joules", "peak_gpu_used_bytes"), lambda: GpuCounters(nvml))
        if self._gpu and self._gpu.no_energy:
            self.reasons["gpu_energy_joules"] = self._gpu.no_energy
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if self._cpu or self._gpu:
            self._thread.start()

    def _attempt(self, keys: Iterable[str], make: Any) -> Any:
        try:
            return make()
        except NotReadable as reason:
            self.reasons |= dict.fromkeys(keys, str(reason))
            return None

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_READINGS):
            self._update()

    def _update(self) -> None:
        for counters in (self._cpu, self._gpu):
            if counters:
                counters.update()

    def figures(self) -> dict[str, Any]:
        """Bytes and joules; None where there is a reason in `not_measured`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._update()
        return {
            "peak_gpu_used_bytes": self._gpu and self._gpu.peak_used,
            "cpu_energy_joules": self._cpu and self._cpu.joules,
            "gpu_energy_joules": self._gpu and self._gpu.joules,
            "not_measured": self.reasons,
        }


def own_peak_rss() -> int:
    """Bytes, since this process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss(os.getpid()) or (peak if sys.platform == "darwin" else peak * 1024)


def peak_rss(pid: int) -> int | None:
    """Bytes; None where there is no /proc, or no such process."""
    for line in read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def resource_lines(figures: dict[str, Any]) -> list[str]:
    """The report as text."""
    memory = [
        f"{name} {figures[key] / _GIB:.2f} GiB"
        for name, key in (
            ("peak RSS", "peak_rss_bytes"),
            ("peak of torch on the GPU", "peak_gpu_allocated_bytes"),
            ("GPU in use", "peak_gpu_used_bytes"),
        )
        if figures.get(key) is not None
    ]
    energy = [
        f"{name} {figures[key]:,.0f} J"
        for name, key in (("CPU", "cpu_energy_joules"), ("GPU", "gpu_energy_joules"))
        if figures.get(key) is not None
    ]
    reasons = figures["not_measured"]
    return [
        f"memory      {', '.join(memory) or reasons.get('peak_rss_bytes', 'not measured')}",
        f"energy      {', '.join(energy) or 'not measured: ' + reasons.get('cpu_energy_joules', '')}",
    ]

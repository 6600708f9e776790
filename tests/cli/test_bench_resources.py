"""Memory and energy counters: real ones where there are some, files and a library of the same shape elsewhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli.bench.resources import CpuEnergy, NotReadable, Resources, own_peak_rss, peak_rss, resource_lines


def zone(folder: Path, name: str, label: str, energy: int) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(label + "\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")
    return path / "energy_uj"


def test_energy_of_packages_is_added_up_across_a_wrap(tmp_path: Path) -> None:
    first, second = (
        zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 5),
    )
    zone(tmp_path, "intel-rapl:0:0", "core", 1), zone(tmp_path, "intel-rapl:2", "psys", 1)
    meter = CpuEnergy(tmp_path)
    first.write_text("2000000")  # over its end: 3 J
    second.write_text("500005")  # 0.5 J
    meter.update()
    assert meter.joules == pytest.approx(3.5)
    first.write_text("4000000")
    meter.update()
    assert meter.joules == pytest.approx(5.5)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotReadable, match="has no RAPL counters"):
        CpuEnergy(tmp_path)
    figures = Resources(tmp_path, "libnothing.so").figures()
    assert figures["cpu_energy_joules"] is figures["gpu_energy_joules"] is figures["peak_gpu_used_bytes"] is None
    assert figures["not_measured"]["gpu_energy_joules"] == "there is no libnothing.so"
    lines = resource_lines({"peak_rss_bytes": 3 << 29, **figures})
    assert lines[0] == "memory      peak RSS 1.50 GiB"
    assert lines[1] == f"energy      not measured: {tmp_path} has no RAPL counters"


def test_memory_that_was_touched_stays_in_the_peak() -> None:
    before = own_peak_rss()
    block = bytearray(os.urandom(1) * (64 << 20))
    del block
    assert own_peak_rss() >= max(before, 64 << 20)
    assert peak_rss(2**22 + 1) is None


NVML = """
static unsigned long long millijoules = 5000, used = 1ull << 30;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1ul); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
    memory[0] = 8ull << 30; memory[1] = 7ull << 30; memory[2] = used; return device ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy)
{
    if (ENERGY_STATUS) return ENERGY_STATUS;
    *energy = millijoules; millijoules += 250; return device ? 0 : 2;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("status", [0, 3])
def test_nvml_by_its_c_interface(tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    source, library = tmp_path / "nvml.c", tmp_path / "libnvml.so"
    source.write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DENERGY_STATUS={status}", "-o", library, source], check=True)
    resources = Resources(tmp_path, str(library))
    figures = resources.figures()
    assert figures["peak_gpu_used_bytes"] == 2 << 30
    if status:
        assert figures["gpu_energy_joules"] is None
        assert figures["not_measured"]["gpu_energy_joules"] == "nvmlDeviceGetTotalEnergyConsumption returned 3"
    else:
        assert figures["gpu_energy_joules"] == pytest.approx(1.0)  # two devices, read twice: 4 x 250 mJ

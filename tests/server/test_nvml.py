"""Readings of GPUs through NVML. Where there is no GPU, a library of the same functions is compiled and read."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.server.observe.exposition import families
from quire.server.observe.metrics import Metrics
from quire.server.observe.nvml import LIBRARY, GPUReading, read_gpus

SOURCE = """
#include <string.h>
typedef struct { unsigned gpu, memory; } use_t;
typedef struct { unsigned long long total, free, used; } memory_t;
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (i > 1) return 2; *h = &devices[i]; return 0; }
int nvmlDeviceGetName(void *h, char *out, unsigned n) { strncpy(out, *(int *)h ? "Second" : "First", n); return 0; }
int nvmlDeviceGetUtilizationRates(void *h, use_t *u) { u->gpu = 73; u->memory = 20; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = 1ull << 37; m->used = 5ull << 33; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *p) { if (*(int *)h) return 3; *p = 412500; return 0; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *t) { *t = 61 + sensor; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler on this machine")
def test_readings_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvml.c").write_text(SOURCE)
    library = tmp_path / "libnvml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = read_gpus(str(library))
    assert first == GPUReading(0, "First", 0.73, 5 << 33, 1 << 37, 412.5, 61.0)
    assert second.name == "Second" and second.power is None, "what it does not tell is left out"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.number for gpu in read_gpus(str(library))] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert read_gpus(str(library)) == []
    shown = {family.name: family.samples for family in families(Metrics(), [first, second])}
    assert shown["quire_gpu_power_watts"][0].value == 412.5 and len(shown["quire_gpu_power_watts"]) == 1
    assert shown["quire_gpu_memory_used_bytes"][1].labels == {"gpu": "1", "gpu_name": "Second"}


def test_without_a_driver_there_are_none() -> None:
    assert read_gpus("libno-such-library.so") == []
    for gpu in read_gpus(LIBRARY):  # where there is one
        assert gpu.name and gpu.memory_total and gpu.memory_used is not None and gpu.memory_used <= gpu.memory_total

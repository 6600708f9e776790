"""What NVIDIA's driver says of the GPUs: use, memory, power, temperature. Read through its library, libnvidia-ml."""

import ctypes
import os
from functools import cache
from typing import NamedTuple

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU


class GPUReading(NamedTuple):
    """What a GPU does not tell is None."""

    number: int
    name: str
    utilization: float | None  # share of the last moment in which a kernel ran
    memory_used: int | None  # bytes, of all processes
    memory_total: int | None
    power: float | None  # watts
    temperature: float | None  # degrees Celsius


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@cache
def _library(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(name)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None  # there is no driver


def read_gpus(library_name: str = LIBRARY) -> list[GPUReading]:
    """Read the GPUs that this process may use, as far as CUDA_VISIBLE_DEVICES has numbers; none without a driver."""
    library = _library(library_name)
    count = ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = [int(each) for each in visible if each.strip().isdigit()] or range(count.value)
    return [reading for index in chosen if (reading := _read(library, index)) is not None]


def _read(library: ctypes.CDLL, index: int) -> GPUReading | None:
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    name = ctypes.create_string_buffer(NAME_BYTES)
    use, memory, power, heat = _Utilization(), _Memory(), ctypes.c_uint(), ctypes.c_uint()
    library.nvmlDeviceGetName(handle, name, ctypes.c_uint(NAME_BYTES))
    has_use = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0
    has_memory = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    has_power = library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)) == 0
    has_heat = library.nvmlDeviceGetTemperature(handle, ctypes.c_int(GPU_SENSOR), ctypes.byref(heat)) == 0
    return GPUReading(
        index,
        name.value.decode("utf-8", "replace"),
        use.gpu / 100 if has_use else None,
        memory.used if has_memory else None,
        memory.total if has_memory else None,
        power.value / 1000 if has_power else None,
        float(heat.value) if has_heat else None,
    )

"""What each of several engines on one machine may use."""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.client.this_gpu import DRIVER
from quire.core.errors import Unsupported

if TYPE_CHECKING:
    from quire.engine.options import EngineOptions

log = logging.getLogger("quire.engine")

VISIBLE = "CUDA_VISIBLE_DEVICES"


def cpu_shares(num_engines: int, threads: int | None) -> list[list[int]]:
    """The CPUs of each engine, the first get one more; [] is all: they cannot be divided, or threads are given."""
    shared: list[list[int]] = [[] for _ in range(num_engines)]
    if threads is not None or not hasattr(os, "sched_getaffinity"):
        return shared
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < num_engines:
        log.warning("%d engines share %d CPUs: they will disturb each other", num_engines, len(cpus))
        return shared
    each, more = divmod(len(cpus), num_engines)
    sizes = [each + (number < more) for number in range(num_engines)]
    starts = [sum(sizes[:number]) for number in range(num_engines)]
    return [cpus[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def num_gpus(options: "EngineOptions") -> int:
    """One for each process of an engine, of those that are on this machine."""
    return options.tensor_parallel_size * (1 if options.stage_addresses else options.num_stages)


def gpu_shares(num_engines: int, processes: int = 1) -> list[Mapping[str, str]]:
    """The environment of each engine: it sees one GPU for each of its processes, the ranks of all stages."""
    given = os.environ.get(VISIBLE)
    gpus = [str(number) for number in range(len(list(DRIVER.glob("*"))))] if given is None else given.split(",")
    gpus = [gpu for gpu in gpus if gpu]
    if num_engines * processes > len(gpus):
        of_processes = f" with {processes} processes each" if processes > 1 else ""
        raise Unsupported(
            f"data_parallel_size is {num_engines}{of_processes}, and {len(gpus)} GPUs are visible",
            f"use data_parallel_size {max(len(gpus) // processes, 1)}, or device cpu",
        )
    firsts = range(0, num_engines * processes, processes)
    return [{VISIBLE: ",".join(gpus[first : first + processes])} for first in firsts]

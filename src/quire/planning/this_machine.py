"""This machine as a row of hardware: what its kernels reach, measured in a few seconds and kept."""

import json
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from os import getloadavg
from pathlib import Path
from typing import Any

import numpy as np

from quire.ops.kv_spec import KVSpec
from quire.ops.native import NativeOps
from quire.ops.opset import ProgramSpec, StepBatch
from quire.ops.tensors import F16, F32, Q8_0, StorageType, StoredTensor
from quire.planning.hardware import Hardware
from quire.runtime.available_memory import available_memory

log = logging.getLogger(__name__)

SIZE, NUM_MATRICES = 2048, 24  # 24 matrices of 8 bits are 107 MB: more than caches hold
ROWS = 256  # tokens of the step that is bound by compute
REPEATS = 5


def this_machine(kept: Path, *, measure_again: bool = False) -> Hardware:
    """`kept`: the file that remembers the measurement, for this CPU and number of threads."""
    if not measure_again and (row := machine_as_kept(kept)) is not None:
        return row
    threads = NativeOps().threads
    load = getloadavg()[0]
    rates = {**measure(threads), "process_bytes": float(engine_process_bytes() or 0), "load": load}
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({**_read(kept), _key(threads): rates}, indent=2))
    except OSError as error:
        log.warning("what was measured cannot be kept in %s: %s", kept, error.strerror)
    return _row(threads, rates)


def machine_as_kept(kept: Path) -> Hardware | None:
    """This machine as it was measured before, or None: nothing is measured, for a server computes meanwhile."""
    threads = NativeOps().threads
    rates = _read(kept).get(_key(threads))
    return None if rates is None else _row(threads, rates)


def load_while_measured(kept: Path) -> float | None:
    """Programs that ran when this machine was measured, or None if that is not known."""
    return _read(kept).get(_key(NativeOps().threads), {}).get("load")


def _key(threads: int) -> str:
    return f"{platform.node()} {platform.machine()} {threads}"


ENGINE = "import quire.engine.process, quire.executors.local, quire.ops.native, quire.models.llama"
READ = "import re; print(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])"


@cache
def engine_process_bytes(*more: str) -> int | None:
    """What an engine process takes before it has a model: a Python that imports what it does. None: not on Linux.
    `more`: modules that it imports besides."""
    imports = ", ".join((ENGINE, *more))
    done = subprocess.run([sys.executable, "-c", f"{imports}; {READ}"], capture_output=True, text=True, check=False)
    return 1024 * int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None


def measure(threads: int) -> dict[str, float]:
    """Bytes a second of one token through 8-bit weights; operations a second of 256 tokens, in 8 and 16 bits."""
    step8, nbytes = _steps(Q8_0, threads)
    flops = 2.0 * SIZE * SIZE * NUM_MATRICES
    one_token, many_tokens = _fastest(step8, 1), _fastest(step8, ROWS)
    step16, _ = _steps(F16, threads)
    return {
        "bandwidth": nbytes / one_token,
        "flops_8bit": ROWS * flops / many_tokens,
        "flops": ROWS * flops / _fastest(step16, ROWS),
    }


def _steps(kind: StorageType, threads: int) -> tuple[Callable[[int], None], int]:
    """-> a function that runs a step of so many tokens, and the bytes of its matrices."""
    ops = NativeOps(threads)
    row = np.random.default_rng(0).integers(0, 60, SIZE // kind.block * kind.block_bytes, np.uint8)
    matrix = StoredTensor("measured", (SIZE, SIZE), kind, np.broadcast_to(row, (SIZE, len(row))))
    weights = [ops.pack([matrix]) for _ in range(NUM_MATRICES)]
    table = ops.table(StoredTensor("table", (1, SIZE), F32, np.zeros((1, 4 * SIZE), np.uint8)))

    def forward(recorder: Any, batch: Any) -> Any:
        x = recorder.embedding(batch.ids, table)
        for w in weights:
            x = recorder.linear(x, w)
        return recorder.rows(x, batch)

    cache = ops.new_cache(KVSpec(1, 1, 64, 16, "float16"), 1)
    program = ops.compile(forward, cache, ProgramSpec(ROWS))

    def run(num_tokens: int) -> None:
        """Sequences of one token."""
        zeros, ones = np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.int32)
        starts = np.arange(num_tokens + 1, dtype=np.int32)
        program.run(StepBatch(zeros, zeros, zeros, starts, ones, zeros[:, None], starts[:-1]))

    return run, sum(w.nbytes for w in weights)


def _fastest(step: Callable[[int], None], num_tokens: int) -> float:
    """Seconds. The first run warms up."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        step(num_tokens)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _row(threads: int, rates: dict[str, float]) -> Hardware:
    return Hardware(
        name=f"this machine ({threads} thread{'s' if threads > 1 else ''})",
        memory=available_memory(),
        bandwidth=rates["bandwidth"],
        flops=rates["flops"],
        flops_8bit=rates["flops_8bit"],
        link=0,
        measured=True,
        is_gpu=False,
        threads=threads,
        process_bytes=int(rates.get("process_bytes", 0)) or None,
    )


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}

"""Work divided among the cores: numpy lets go of the GIL, and its own threads are off (they spin while they wait)."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from quire.ops.native.cpus import compute_threads

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_ROWS = 64  # of a matmul, worth a thread
CHUNK_WEIGHTS = 1 << 16  # encoded at once, so that all arrays stay in a core's cache


_of_pool = threading.local()


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """In the threads of a pool; within one of them, in that one."""
    if len(items) <= 1 or compute_threads() == 1 or getattr(_of_pool, "is_mine", False):
        return [work(item) for item in items]
    return list(_pool(compute_threads()).map(work, items))


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Kept: for a new thread numpy's matmul takes new memory, which costs milliseconds."""
    return ThreadPoolExecutor(num_threads, "quantize", lambda: setattr(_of_pool, "is_mine", True))


def row_spans(num_rows: int) -> list[slice]:
    """Rows cut into a span for each core."""
    step = max(-(-num_rows // compute_threads()), MIN_ROWS)
    return [slice(first, first + step) for first in range(0, num_rows, step)]

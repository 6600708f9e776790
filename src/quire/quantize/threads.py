"""Work divided among the cores: numpy lets go of the GIL, and its own threads are off (they spin while they wait)."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.ops.native.cpus import compute_threads

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_ROWS = 64  # of a matmul, worth a thread
CHUNK_WEIGHTS = 1 << 16  # encoded at once, so that all arrays stay in a core's cache


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    if len(items) <= 1 or compute_threads() == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(compute_threads()) as pool:
        return list(pool.map(work, items))


def row_spans(num_rows: int) -> list[slice]:
    """Rows cut into a span for each core."""
    step = max(-(-num_rows // compute_threads()), MIN_ROWS)
    return [slice(first, first + step) for first in range(0, num_rows, step)]

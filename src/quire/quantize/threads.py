"""Work divided among the cores: numpy lets go of the GIL, and its own threads are off (they spin while they wait)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from quire.ops.native.cpus import compute_threads

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_SPAN = 64  # rows of a matmul, or columns, that are worth a thread
TILE_ROWS = 48  # a BLAS multiplies 16 or 24 rows at a time, and the rest in another order: cuts are where tiles end
CHUNK_WEIGHTS = 1 << 16  # encoded at once, so that all arrays stay in a core's cache


class _Share(threading.local):
    """How many threads the work of this thread is divided among; None: as many as there are cores."""

    num_threads: int | None = None


_share = _Share()
cores = cache(compute_threads)


@contextmanager
def divided_among(num_threads: int) -> Iterator[None]:
    """What this thread does, for others work too."""
    before, _share.num_threads = _share.num_threads, num_threads
    try:
        yield
    finally:
        _share.num_threads = before


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """In the threads of a pool; within one of them, in that one."""
    if len(items) <= 1 or _num_threads() == 1:
        return [work(item) for item in items]
    return list(_pool().map(work, items))


def spans(count: int) -> list[slice]:
    """Rows or columns cut into a span for each thread. A row has the same bits wherever the cuts are."""
    step = -(-max(-(-count // _num_threads()), MIN_SPAN) // TILE_ROWS) * TILE_ROWS
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _num_threads() -> int:
    return _share.num_threads or cores()


@cache
def _pool() -> ThreadPoolExecutor:
    """Kept: for a new thread numpy's matmul takes new memory, which costs milliseconds."""
    return ThreadPoolExecutor(cores(), "quantize", lambda: setattr(_share, "num_threads", 1))

"""One layer of causal attention by itself: by the backend's kernel, which keeps a tile of scores at a time (flash
attention), and by a naive twin, which keeps all of them."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire.executors.backends import new_ops
from quire.executors.options import ExecutorOptions
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Float32, ProgramSpec, StepBatch
from quire.ops.tensors import F32, StoredTensor


class AttentionLayer:
    """Random queries, keys and values of one sequence of `length` tokens. Both ways start from them and end with the
    output of every token; the kernel writes keys and values to its pages first, as in a prefill."""

    def __init__(
        self, options: ExecutorOptions, heads: int, kv_heads: int, head_dim: int, length: int, seed: int = 0
    ) -> None:
        self.options, self.heads, self.kv_heads, self.head_dim, self.length = options, heads, kv_heads, head_dim, length
        self.columns = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.scale = head_dim**-0.5
        rng = np.random.default_rng(seed)
        self.rows: Float32 = rng.standard_normal((length, sum(self.columns)), dtype=np.float32)

    def ready(self, side: str) -> Callable[[], Any]:
        """`flash` or `naive` -> what computes the outputs [length, heads * head_dim]."""
        return self._flash() if side == "flash" else self._naive()

    def _flash(self) -> Callable[[], Any]:
        ops, block_size = new_ops(self.options), self.options.block_size
        num_blocks = -(-self.length // block_size)
        dtype = "float16" if self.options.kv_dtype == "auto" else self.options.kv_dtype
        cache = ops.new_cache(KVSpec(1, self.kv_heads, self.head_dim, block_size, dtype), num_blocks)
        data = self.rows.view(np.uint8)
        table = ops.table(StoredTensor("rows", self.rows.shape, F32, data))

        def forward(ops: Any, batch: Any) -> Any:
            q, k, v = ops.split(ops.embedding(batch.ids, table), self.columns)
            ops.write_kv(k, v, batch, 0)
            return ops.rows(ops.paged_attention(q, batch, 0, self.head_dim, self.scale), batch)

        program = ops.compile(forward, cache, ProgramSpec(self.length, 1, self.length))
        places = np.arange(self.length, dtype=np.int32)
        starts, contexts = np.array([0, self.length], np.int32), np.array([self.length], np.int32)
        blocks = np.arange(num_blocks, dtype=np.int32)[None]
        batch = StepBatch(places, places, places, starts, contexts, blocks, places)
        return lambda: program.run(batch)

    def _naive(self) -> Callable[[], Any]:
        if self.options.on_gpu:
            from quire.ops.gpu.attention.naive import naive_attention

            return naive_attention(self.rows, self.columns, self.head_dim, self.scale, self.options.gpu_dtype)
        return lambda: _naive(self.rows, self.columns, self.head_dim, self.scale)

    def wait(self, result: Any) -> Float32:
        """The outputs, once they are computed."""
        return np.asarray(result.float().cpu() if hasattr(result, "cpu") else result)

    def difference(self, one: Any, other: Any) -> float:
        """The largest between two outputs, as a share of the largest value."""
        naive, flash = self.wait(one), self.wait(other)
        return float(np.abs(naive - flash).max() / np.abs(naive).max())

    def peak_bytes(self, side: str) -> int | None:
        """Memory that a side takes at its peak, with its cache and buffers, beyond its inputs; None where that cannot
        be read."""

        def run() -> None:
            self.ready(side)()

        if self.options.on_gpu:
            from quire.ops.gpu.attention.naive import peak_bytes

            return peak_bytes(run)
        return _peak_resident(run)


def _naive(rows: Float32, columns: list[int], head_dim: int, scale: float) -> Float32:
    length, group = len(rows), columns[0] // columns[1]
    q, k, v = (
        part.reshape(length, -1, head_dim).transpose(1, 0, 2) for part in np.split(rows, np.cumsum(columns)[:2], axis=1)
    )
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1) * np.float32(scale)  # [heads, length, length]
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray((scores @ v).transpose(1, 0, 2)).reshape(length, -1)


def _peak_resident(run: Callable[[], Any]) -> int | None:
    """The most memory that this process had, by Linux's own counter, which can be set back."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is given back, and shows when it is taken again
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return max(_status("VmHWM") - before, 0)
    except (OSError, AttributeError):  # not Linux, or without glibc
        return None


def _status(name: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def blas_threads() -> int:
    """Threads of numpy's matmuls: `quire` sets them to 1 unless the user has."""
    value = os.environ.get("OPENBLAS_NUM_THREADS", "1")
    return int(value) if value.isdecimal() and int(value) else 1

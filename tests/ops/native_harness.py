"""Ops run one at a time: rows go in through an embedding table of floats and come out as hidden states."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.ops.kv_spec import KVSpec
from quire.ops.native import NativeOps
from quire.ops.opset import Float32, ProgramSpec, StepBatch
from quire.ops.tensors import F32, StoredTensor

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")


def stored(array: Any, name: str = "") -> StoredTensor:
    array = np.ascontiguousarray(array, dtype=np.float32)
    return StoredTensor(name, array.shape, F32, array.reshape(-1, array.shape[-1]).view(np.uint8))


def int32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


class Pool:
    """Hands out blocks in a random order, and makes batches of (sequence, tokens) runs."""

    def __init__(self, spec: KVSpec, num_blocks: int, seed: int = 0) -> None:
        self.size = spec.block_size
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def batch(self, runs: Sequence[tuple[int, Sequence[int]]]) -> StepBatch:
        """Append ids to sequences; the logits of every row are requested."""
        ids, positions, slots, starts, contexts = [], [], [], [0], []
        for seq, tokens in runs:
            table, start = self.tables.setdefault(seq, []), self.computed.get(seq, 0)
            end = self.computed[seq] = start + len(tokens)
            while len(table) * self.size < end:
                table.append(self.free.pop())
            ids += tokens
            positions += range(start, end)
            slots += [table[p // self.size] * self.size + p % self.size for p in range(start, end)]
            starts.append(starts[-1] + len(tokens))
            contexts.append(end)
        width = max(len(self.tables[seq]) for seq, _ in runs)
        tables = [self.tables[seq] + [-1] * (width - len(self.tables[seq])) for seq, _ in runs]
        fields = (ids, positions, slots, starts, contexts, tables, range(len(ids)))
        return StepBatch(*(int32(list(field)) for field in fields))


def apply(op: Callable[[Any, Any, Any], Any], x: Float32, positions: Any = None, threads: int = 2) -> Float32:
    """op(ops, x, batch) on rows x."""
    ops = NativeOps(threads)
    table = ops.table(stored(x))

    def forward(recorder: Any, batch: Any) -> Any:
        value = op(recorder, recorder.embedding(batch.ids, table), batch)
        return recorder.rows(value, batch)

    program = ops.compile(forward, ops.new_cache(SPEC, 64), ProgramSpec(len(x)))
    batch = Pool(SPEC, 64).batch([(0, range(len(x)))])
    if positions is not None:
        batch.positions = int32(positions)
    return program.run(batch).copy()


def max_error(x: Any, truth: Any) -> float:
    assert np.shape(x) == np.shape(truth)
    return float(np.abs(np.asarray(x, dtype=np.float64) - np.asarray(truth)).max())


def assert_close(x: Any, plain: Any, truth: Any) -> None:
    """At most twice the error of plain fp32 arithmetic, both against fp64."""
    assert max_error(x, truth) <= 2 * max_error(plain, truth) + 1e-5

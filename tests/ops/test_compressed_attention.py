"""Compressed attention and residual streams: the CPU's kernels against plain torch, over steps of several sequences."""

from typing import Any

import numpy as np
import pytest

from quire.ops.kv_spec import CompressedLayer, CompressedSpec, KVSpec, WindowSpec
from quire.ops.native import NativeOps
from quire.ops.opset import ProgramSpec, StepBatch
from quire.ops.reference import TorchOps
from quire.ops.tensors import stored_floats

HEADS, HEAD, INDEX, INDEX_HEADS, STREAMS, WINDOW, TOP_K, VOCAB = 3, 20, 12, 4, 3, 5, 4, 50
OVERLAPPING = CompressedLayer(HEAD + 4 * (HEAD + INDEX), 3, (HEAD, INDEX))
PLAIN = CompressedLayer(3 * HEAD, 7, (HEAD,))
COLUMNS = {  # of what is looked up by a token's id
    "overlapping": OVERLAPPING.columns, "plain": PLAIN.columns, "q": HEADS * HEAD, "index_q": INDEX_HEADS * INDEX,
    "weights": INDEX_HEADS, "mixes": (2 + STREAMS) * STREAMS, "x": STREAMS * 8, "y": 8,
}  # fmt: skip


class Model:
    """Attention of both kinds, and streams, of numbers that depend on the token alone."""

    def __init__(self, ops: Any) -> None:
        draw = np.random.default_rng(1)

        def numbers(*shape: int) -> Any:
            return draw.standard_normal(shape, np.float32)

        self.tables = {name: ops.table(stored_floats(name, numbers(VOCAB, n))) for name, n in COLUMNS.items()}
        stored = {"overlapping": (3, 2 * HEAD), "index": (3, 2 * INDEX), "plain": (7, HEAD)}
        self.biases = {name: ops.biases(numbers(*shape)) for name, shape in stored.items()}
        self.sinks, self.scale, self.base = (
            ops.vector(stored_floats("vector", numbers(n))) for n in (HEADS, 3, COLUMNS["mixes"])
        )

    def forward(self, ops: Any, batch: Any) -> Any:
        of = {name: ops.embedding(batch.ids, table) for name, table in self.tables.items()}
        ops.write_tokens(of["plain"], batch, 1)
        first, rest = ops.split(of["overlapping"], (HEAD, 4 * (HEAD + INDEX)))
        ops.write_tokens(first, batch, 0)
        ops.write_tokens(rest, batch, 0, HEAD)
        ops.write_entry(ops.pool_group(batch, 0, HEAD, HEAD, self.biases["overlapping"], True), batch, 0, 0)
        ops.write_entry(ops.pool_group(batch, 0, 5 * HEAD, INDEX, self.biases["index"], True), batch, 0, 1)
        ops.write_entry(ops.pool_group(batch, 1, HEAD, HEAD, self.biases["plain"], False), batch, 1, 0)
        chosen = ops.top_entries(of["index_q"], of["weights"], batch, 0, TOP_K)
        some = ops.compressed_attention(of["q"], batch, 0, 0.3, WINDOW, self.sinks, chosen)
        every = ops.compressed_attention(of["q"], batch, 1, 0.3, WINDOW, self.sinks)
        weights = ops.stream_weights(of["mixes"], self.scale, self.base, STREAMS, 1e-6, 4)
        pre, post, mixing = ops.split(weights, (STREAMS, STREAMS, STREAMS**2))
        merged = ops.merge_streams(of["x"], pre)
        streams = ops.update_streams(of["x"], ops.add(merged, of["y"]), post, mixing)
        return ops.rows(ops.concat([some, every, streams]), batch)


def run(ops: Any, dtype: str, block_size: int, steps: list[list[tuple[int, int]]], pages: bool) -> list[np.ndarray]:
    """The results of steps: of each, (start, end) of two sequences of 60 tokens."""
    ids = np.random.default_rng(2).integers(0, VOCAB, (2, 60))
    num_blocks = 2 * -(-60 // block_size)
    spec = KVSpec(2, 1, HEAD, block_size, dtype, HEAD, compressed=CompressedSpec((OVERLAPPING, PLAIN), 7))
    if pages:
        spec = KVSpec(2, 1, HEAD, block_size, dtype, HEAD, compressed=spec.compressed,
                      windows=WindowSpec((0, 1), 7, num_blocks))  # fmt: skip
    cache = ops.new_cache(spec, num_blocks)
    if pages:
        cache.attach_pages([(block, num_blocks - 1 - block) for block in range(num_blocks)])
    program = ops.compile(Model(ops).forward, cache, ProgramSpec(128))
    tables = np.random.default_rng(3).permutation(num_blocks).astype(np.int32).reshape(2, -1)
    results = []
    for spans in steps:
        positions = [np.arange(start, end, dtype=np.int32) for start, end in spans]
        slots = [tables[i][p // block_size] * block_size + p % block_size for i, p in enumerate(positions)]
        count = sum(map(len, positions))
        batch = StepBatch(
            ids=np.concatenate([ids[i][p] for i, p in enumerate(positions)]).astype(np.int32),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots).astype(np.int32),
            seq_starts=np.cumsum([0, *map(len, positions)], dtype=np.int32),
            context_lens=np.array([end for _, end in spans], np.int32),
            block_tables=tables,
            logit_rows=np.arange(count, dtype=np.int32),
        )
        rows = program.run(batch)
        results.append(np.array(rows if isinstance(rows, np.ndarray) else rows.numpy()))
    return results


STEPS = [[(0, 17), (0, 30)], [(17, 18), (30, 31)], [(18, 40), (31, 32)], [(40, 60), (32, 60)]]


@pytest.mark.parametrize(
    ("dtype", "block_size", "threads"), [("float32", 16, 1), ("float16", 4, 3), ("bfloat16", 5, 2)]
)
def test_the_kernels_compute_what_torch_computes(dtype: str, block_size: int, threads: int) -> None:
    expected = run(TorchOps(threads=1), dtype, block_size, STEPS, pages=False)
    atol = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    for pages in (False, True):
        actual = run(NativeOps(threads), dtype, block_size, STEPS, pages)
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=atol)


def test_steps_and_threads_change_no_bit() -> None:
    whole = run(NativeOps(1), "float16", 16, [[(0, 60), (0, 60)]], pages=False)[0]
    parts = run(NativeOps(3), "float16", 16, STEPS, pages=True)
    for seq in range(2):
        rows = []
        for spans, result in zip(STEPS, parts, strict=True):
            first = 0 if seq == 0 else spans[0][1] - spans[0][0]
            rows.append(result[first : first + spans[seq][1] - spans[seq][0]])
        np.testing.assert_array_equal(np.concatenate(rows), whole[seq * 60 : (seq + 1) * 60])

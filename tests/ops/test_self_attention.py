"""Attention of a step's sequences to themselves, native, against plain softmax; company must not change a bit of it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from ops.native_harness import int32, stored
from quire.ops.kv_spec import KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import ProgramSpec, StepBatch
from quire.ops.reference import TorchOps

LENGTHS = (1, 5, 70, 33, 16, 300)
SHAPES = {  # heads, KV heads, head_dim, causal, window
    "heads-of-32": (6, 6, 32, False, 0),
    "odd-heads": (3, 3, 20, False, 0),
    "groups": (6, 2, 64, False, 0),
    "causal": (4, 4, 16, True, 0),
    "window": (4, 2, 32, False, 9),
    "causal-window": (4, 2, 32, True, 9),
}


@pytest.fixture
def restore_isa():
    yield
    use_isa(available_isas()[0])


def batch_of(sequences: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> StepBatch:
    """Every row's output is wanted, or those of `rows`."""
    ids = int32([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    starts = int32(np.cumsum([0, *lengths]))
    positions = int32([place for length in lengths for place in range(length)])
    tables = np.zeros((len(lengths), -(-max(lengths) // 16)), np.int32)
    wanted = range(len(ids)) if rows is None else rows
    return StepBatch(ids, positions, np.zeros_like(ids), starts, int32(lengths), tables, int32(list(wanted)))


class Case:
    """Random q, k and v: the token with id i has row i."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.heads, self.kv_heads, self.head_dim, self.causal, self.window = SHAPES[name]
        self.columns = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        rng = np.random.default_rng(seed)
        self.rows = (rng.standard_normal((sum(LENGTHS), sum(self.columns))) * 1.5).astype(np.float32)
        starts = np.cumsum([0, *LENGTHS])
        self.sequences = [range(a, b) for a, b in pairwise(starts)]

    def program(self, ops: Any, dtype: str) -> Any:
        table = ops.table(stored(self.rows))

        def forward(ops: Any, batch: Any) -> Any:
            q, k, v = ops.split(ops.embedding(batch.ids, table), self.columns)
            scale = self.head_dim**-0.5
            return ops.rows(ops.attention(q, k, v, batch, self.head_dim, scale, self.causal, self.window), batch)

        cache = ops.new_cache(KVSpec(0, self.kv_heads, self.head_dim, 16, dtype), 64)
        return ops.compile(forward, cache, ProgramSpec(len(self.rows)))

    def plain(self) -> np.ndarray:
        outs = []
        for ids in self.sequences:
            q, k, v = torch.from_numpy(self.rows[list(ids)]).double().split(self.columns, dim=1)
            q, k, v = (x.unflatten(1, (-1, self.head_dim)).transpose(0, 1) for x in (q, k, v))
            far = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
            seen = (far >= 0) if self.causal else torch.ones_like(far, dtype=torch.bool)
            if self.window:
                seen &= far.abs() < self.window
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            outs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outs).numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_plain_torch_is_the_definition(name: str) -> None:
    case = Case(name)
    out = case.program(TorchOps(threads=1), "float32").run(batch_of(case.sequences))
    np.testing.assert_allclose(out.numpy(), case.plain(), atol=2e-5)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", SHAPES)
def test_native_is_plain(name: str, isa: str, restore_isa: None) -> None:
    use_isa(isa)
    case = Case(name)
    for dtype, error in (("float32", 2e-5), ("float16", 2e-2), ("bfloat16", 5e-2), ("int8", 2e-1)):
        out = case.program(NativeOps(2), dtype).run(batch_of(case.sequences))
        np.testing.assert_allclose(out, case.plain(), atol=error, err_msg=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_company_order_and_threads_change_nothing(name: str, dtype: str) -> None:
    case = Case(name)
    program = case.program(NativeOps(3), dtype)
    together = program.run(batch_of(case.sequences)).copy()
    backwards = program.run(batch_of(case.sequences[::-1])).copy()
    at = len(together)
    for ids in case.sequences:
        at -= len(ids)
        alone = case.program(NativeOps(1), dtype).run(batch_of([ids]))
        assert np.array_equal(alone, together[list(ids)])
        assert np.array_equal(alone, backwards[at : at + len(ids)])


@pytest.mark.parametrize("name", SHAPES)
def test_some_rows_are_the_same_rows(name: str) -> None:
    """Those of several sequences, several of one, and not in order."""
    case = Case(name)
    program = case.program(NativeOps(2), "float16")
    everything = program.run(batch_of(case.sequences)).copy()
    wanted = [0, 1, 6, 7, 9, 75, 40, 120, 424, 424]
    assert np.array_equal(program.run(batch_of(case.sequences, wanted)), everything[wanted])

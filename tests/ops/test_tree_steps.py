"""The steps in which a GPU grows trees of drafts, on a CPU: kernels read their arrays as if they were contiguous."""

import numpy as np
import pytest
import torch

from quire.ops.gpu.batch import GpuBatch
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.tree_steps import TreeSteps
from quire.ops.kv_spec import KVSpec
from quire.ops.program import TreeRoots, TreeShape

VOCAB, COLUMNS = 50, 8


@pytest.mark.parametrize("num_seqs", [1, 2, 3])
def test_arrays_of_steps_are_contiguous(num_seqs: int) -> None:
    cache = GpuCache(KVSpec(1, 1, 16, 16, "float32"), 9, 0, "cpu")
    steps: list[GpuBatch] = []

    def forward(step: GpuBatch) -> torch.Tensor:
        steps.append(step)
        step.kept = torch.zeros(len(step.positions), COLUMNS)
        return torch.rand(len(step.positions), VOCAB)

    grower = TreeSteps(forward, cache, GpuHiddenStates(torch.zeros(40, COLUMNS)), 160, 4)
    positions = np.arange(20, 20 + num_seqs, dtype=np.int32)
    tables = np.tile(np.arange(4, dtype=np.int32), (num_seqs, 1))
    rows, keys = 9 * np.arange(num_seqs, dtype=np.int32), np.zeros((num_seqs, 3, 2), np.int64)
    roots = TreeRoots(positions, tables, rows, np.zeros(num_seqs, np.float32), keys)
    shape = TreeShape(num_levels=3, top_k=4, num_children=8, num_candidates=8, num_nodes=14)
    arrays = [torch.from_numpy(array) for array in grower._arrays(roots, shape)]
    trees = grower._levels(torch.rand(len(arrays[0]), VOCAB), arrays, shape)
    assert trees.shape == (len(arrays[0]), 3, 14) and len(steps) == 2
    for level, step in enumerate(steps):
        assert step.positions[: 4 * num_seqs].tolist() == np.repeat(positions + level, 4).tolist()
        of_tokens = [step.ids.ids, step.positions, step.slots, step.logit_rows, step.ancestors, step.hidden]
        assert all(one is not None and one.is_contiguous() for one in of_tokens)

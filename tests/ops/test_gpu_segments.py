"""Where the tokens of a step find states and leave them, as it travels to a GPU."""

import numpy as np
import torch

from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.graph_inputs import GraphInputs
from quire.ops.gpu.program import GpuProgram
from quire.ops.gpu.states.segments import are_independent, segment_arrays, segments_on_device, with_segments
from quire.ops.kv_spec import ConvSpec, KVSpec, StateSpec
from quire.ops.opset import StepBatch

CPU = torch.device("cpu")
STATES = KVSpec(1, 1, 8, 4, "float32", states=StateSpec(1, (1, 2, 3), 5, 4, 9))
CONV = KVSpec(1, 1, 8, 4, "float32", conv=ConvSpec(1, 5, 4))


def step(counts: list[int], contexts: list[int], tables: list[list[int]] | None = None) -> StepBatch:
    starts = np.cumsum([0, *counts], dtype=np.int32)
    positions = np.concatenate([np.arange(c - n, c, dtype=np.int32) for n, c in zip(counts, contexts, strict=True)])
    blocks = np.array(tables or [[0] * 9] * len(counts), np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = blocks[rows, positions // 4] * 4 + positions % 4
    return StepBatch(
        np.zeros_like(positions), positions, slots, starts, np.array(contexts, np.int32), blocks, starts[1:] - 1
    )


def test_segments_that_depend_on_each_other_form_chains() -> None:
    states = np.array([(1, 3, 3), (9, -1, 0), (12, 0, 1), (13, 0, 2), (15, 4, 4)], np.int32)
    arrays = segment_arrays(states, taps=4)
    assert arrays.chain_starts.tolist() == [0, 1, 4, 5]
    assert arrays.table.tolist() == [[0, 1, 3, 3], [1, 9, -1, 0], [9, 12, 0, 1], [12, 13, 0, 2], [13, 15, 4, 4]]
    assert arrays.before.tolist() == [-5, -1, *range(1, 8), 8, 9, 10, 8, -6, 13]
    assert arrays.num_near.tolist() == [1, 0, 1]  # a token, or two, behind a slot: three inputs are kept
    assert are_independent(states[[0, 1, 4]]) and not are_independent(states)


def test_near_segments_of_a_chain_come_first() -> None:
    """A convolution leaves their states before a later one overwrites the slot that they read."""
    states = np.array([(1, 3, 5), (9, 5, 3), (10, 5, 6)], np.int32)
    arrays = segment_arrays(states, taps=4)
    assert arrays.table[:, 1].tolist() == [1, 10, 9] and arrays.num_near.tolist() == [2]


def test_states_in_blocks_are_slots() -> None:
    batch = with_segments(step([6, 1], [7, 9], [[5, 2, 0], [7, 8, 3]]), CONV)
    assert batch.states is not None
    assert batch.states.tolist() == [[3, 5, 5], [6, 5, 2], [7, 8, 3]]


def test_a_dry_run_leaves_nothing() -> None:
    batch = step([2, 3], [2, 3])
    batch.slots[:] = -1
    for spec in (STATES, CONV):
        states = with_segments(batch, spec).states
        assert states is not None and states.tolist() == [[2, -1, -1], [5, -1, -1]]


def test_a_graphs_segments_are_padded() -> None:
    inputs = GraphInputs(8, 4, 16, CPU, decodes=False, state_taps=4)
    for counts, states in (
        ([3, 2, 1], [(3, 1, 1), (5, 2, 2), (6, 3, 3)]),
        ([4, 1], [(2, -1, 4), (4, 4, 0), (5, 7, 7)]),
    ):
        batch = step(counts, counts)
        batch.states = np.array(states, np.int32)
        inputs.send(batch)
    assert inputs.segments is not None
    segments = inputs.segments.segments
    assert segments.table.tolist() == [[0, 2, -1, 4], [2, 4, 4, 0], [4, 5, 7, 7], *[[0, 0, -1, -1]] * 5]
    assert segments.chain_starts.tolist() == [0, 2, 3, 3, 3] and segments.num_near.tolist() == [1, 1, 0, 0]
    assert segments.before.tolist() == [-1, 0, 1, 2, -9, -1, -1, -1] and not segments.single
    assert not any(array.storage_offset() % 16 for array in (segments.table, segments.chain_starts, segments.before))


def test_a_graph_that_decodes_pads_with_tokens_that_leave_nothing() -> None:
    inputs = GraphInputs(4, 4, 16, CPU, decodes=True, state_taps=4)
    batch = step([1, 1], [9, 5])
    batch.states = np.array([(1, 3, 3), (2, 4, 0)], np.int32)
    inputs.send(batch)
    assert inputs.segments is not None
    segments = inputs.segments.segments
    assert segments.table.tolist() == [[0, 1, 3, 3], [1, 2, 4, 0], [2, 3, -1, -1], [3, 4, -1, -1]]
    assert segments.chain_starts.tolist() == [0, 1, 2, 3, 4] and segments.single
    same = segments_on_device(batch, 4, CPU)
    assert same.single and same.table.tolist() == segments.table[:2].tolist()


def test_models_with_states_take_no_trees() -> None:
    for spec in (STATES, CONV):
        assert not GpuProgram(lambda batch: batch.slots, GpuCache(spec, 9, 0, "cpu"), 64, 5, 30).takes_trees

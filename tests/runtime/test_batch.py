"""Rows and runs as flat arrays."""

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from quire.core.draft_tree import UNKNOWN_PARENT
from quire.core.params import SamplingParams
from quire.core.plan import UNKNOWN, Admission, Run
from quire.runtime.batch import BatchRows, Places


def admission(
    row: int, tokens: list[int], blocks: list[int], num_prompt: int | None = None, prompt_logprobs: int | None = None
) -> Admission:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Admission(row, params, 0, tokens, len(tokens) if num_prompt is None else num_prompt, blocks, [])


def expect(rows: BatchRows, row: int, num_drafts: int = 0) -> Places:
    return rows.expect(np.array([row], np.int32), np.array([num_drafts], np.int32))


def test_a_mixed_step() -> None:
    rows = BatchRows(4, 32, block_size=4)
    rows.admit(admission(2, [10, 11, 12, 13, 14, 15], [7, 3]))
    rows.admit(replace(admission(0, [20, 21, 22, 23, 24], [5, 1]), adapter=3))
    step = rows.step([Run(2, 1, 3), Run(0, 4, 1)])  # a chunk within a prompt, and the last known token of another
    batch = step.batch
    assert batch.ids.tolist() == [11, 12, 13, 24]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    assert batch.slots.tolist() == [29, 30, 31, 4]
    assert batch.seq_starts.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [4, 5]
    assert batch.block_tables.tolist() == [[7, 3], [5, 1]]
    assert batch.logit_rows.tolist() == [3]
    assert batch.adapters.tolist() == [-1, -1, -1, 3]
    assert step.sampling.tolist() == [0]
    for name in type(batch).__slots__:
        array = getattr(batch, name)
        if name not in ("source_lens", "source_tables", "ancestors", "hidden_rows", "states"):  # which other files tell
            assert array.dtype == np.int32 and array.flags.c_contiguous, name


def test_runs_become_segments_that_follow_each_other() -> None:
    rows = BatchRows(4, 32, block_size=4)
    rows.admit(admission(2, [10, 11, 12, 13, 14, 15], [7, 3]))
    rows.admit(admission(0, [20, 21, 22, 23, 24], [5, 1]))
    runs = [Run(2, 0, 6, state=-1, states=[(4, 8), (6, 2)]), Run(0, 4, 1, state=5, states=[(5, 5)])]
    batch = rows.step(runs).batch
    assert batch.states is not None and batch.states.dtype == np.int32
    assert batch.states.tolist() == [[4, -1, 8], [6, 8, 2], [7, 5, 5]]


def test_steps_without_adapters_have_no_array_of_them() -> None:
    rows = BatchRows(4, 32, block_size=4)
    rows.admit(replace(admission(1, [10, 11], [7]), adapter=0))
    rows.admit(admission(0, [20, 21], [5]))
    assert rows.step([Run(1, 0, 2)]).batch.adapters.tolist() == [0, 0]
    assert rows.step([Run(0, 0, 2)]).batch.adapters is None
    rows.retire(1)
    rows.admit(admission(1, [10, 11], [7]))
    assert rows.step([Run(1, 0, 2), Run(0, 0, 2)]).batch.adapters is None


def test_drawn_tokens_and_new_blocks_are_kept() -> None:
    rows = BatchRows(2, 8, block_size=4)
    rows.admit(admission(1, [1, 2, 3, 4], [6]))
    assert rows.step([Run(1, 0, 4)]).sampling.tolist() == [1]
    places = expect(rows, 1)
    assert rows.tokens[1, 4] == ~1  # until it is known, the device is told whose token it is
    rows.settle(places, [[9]])
    step = rows.step([Run(1, 4, 1, new_blocks=[2])])
    assert step.batch.ids.tolist() == [9]
    assert step.batch.slots.tolist() == [8]
    assert step.batch.block_tables.tolist() == [[6, 2]]


def test_a_row_can_be_filled_to_the_last_token() -> None:
    rows = BatchRows(1, 4, block_size=4)
    rows.admit(admission(0, [1, 2, 3, 4], [0]))
    rows.step([Run(0, 0, 4)])
    rows.settle(expect(rows, 0), [[5]])
    assert rows.num_known[0] == 5


def test_prompt_lines_follow_the_drawn_ones() -> None:
    rows = BatchRows(4, 32, block_size=4)
    rows.admit(admission(0, [1, 2, 3, 4, 5], [0, 1], prompt_logprobs=0))
    rows.admit(admission(1, [6, 7, 8], [2]))
    rows.admit(admission(2, [9, 10, 11, 12], [3], num_prompt=2, prompt_logprobs=2))  # readmitted with its output
    step = rows.step([Run(0, 0, 3), Run(1, 0, 3), Run(2, 0, 4)])
    assert step.sampling.tolist() == [1, 2]
    assert step.batch.logit_rows.tolist() == [5, 9, 0, 1, 2, 6]
    assert step.scored == [(0, slice(2, 5), [2, 3, 4]), (2, slice(5, 6), [10])]
    step = rows.step([Run(0, 3, 2)])
    assert step.batch.logit_rows.tolist() == [1, 0]
    assert step.scored == [(0, slice(1, 2), [5])]


def test_broken_plans_are_caught() -> None:
    rows = BatchRows(2, 16, block_size=4)
    rows.admit(admission(0, [1, 2, 3, 4, 5], [0]))
    for run in (Run(0, 0, 6), Run(0, 0, 5), Run(0, 0, 0), Run(0, -1, 2), Run(2, 0, 1), Run(-1, 0, 1)):
        with pytest.raises(ValueError, match="past"):  # what is known, its blocks, the rows there are
            rows.step([run])
    with pytest.raises(AssertionError, match="taken"):
        rows.admit(admission(0, [1], [1]))


def test_a_decode_step_of_64_rows_is_cheap() -> None:
    rows = BatchRows(64, 1024, block_size=16)
    for row in range(64):
        rows.admit(admission(row, list(range(500)), list(range(64))))
    runs = [Run(row, 499, 1) for row in range(64)]

    def seconds() -> float:
        begin = perf_counter()
        rows.step(runs)
        return perf_counter() - begin

    assert any(seconds() < 0.0003 for _ in range(2000)), "none is, and on a busy machine some are"


def test_a_token_that_comes_after_its_row_was_given_up_is_not_written() -> None:
    rows = BatchRows(2, 8, block_size=4)
    rows.admit(admission(1, [1, 2], [6]))
    places = expect(rows, 1)
    rows.retire(1)
    rows.admit(admission(1, [7, 8, 5], [3]))
    assert not rows.held(places).any() and rows.known(places, [[9]]) == {}
    rows.settle(places, [[9]])
    assert rows.step([Run(1, 0, 3)]).batch.ids.tolist() == [7, 8, 5]


def test_a_step_with_a_tree_that_only_the_device_knows() -> None:
    """Its nodes wait there for their positions and words."""
    rows = BatchRows(4, 100, block_size=4)
    rows.admit(admission(1, [10, 11, 12], [7, 3]))
    rows.admit(admission(2, [30, 31], [1]))
    tree = Run(1, 2, 4, drafts=[UNKNOWN] * 3, parents=[UNKNOWN_PARENT] * 3)
    step = rows.step([tree, Run(2, 1, 2, drafts=[60])])
    batch = step.batch
    assert batch.ids.tolist() == [12, ~(1 + 4), ~(1 + 8), ~(1 + 12), 31, 60]
    assert batch.positions.tolist() == [2, 2, 2, 2, 1, 2] and batch.slots.tolist() == [30, 31, 12, 13, 5, 6]
    assert batch.ancestors is not None and batch.ancestors.tolist() == [1, 0, 0, 0, 1, 3]
    step.parents[1][:] = [-1, -1, 0]  # when it is known
    assert tree.parents == [UNKNOWN_PARENT] * 3


def test_a_step_with_a_tree() -> None:
    """Beside a chunk of a prompt that is too long for a word, and a chain of drafts."""
    rows = BatchRows(4, 100, block_size=4)
    rows.admit(admission(0, [10, 11, 12, 13, 14], [7, 3, 5]))
    rows.admit(admission(1, list(range(70)), list(range(20, 38))))
    rows.admit(admission(2, [30, 31], [1]))
    tree = Run(0, 3, 6, drafts=[50, 51, 52, 53], parents=[-1, -1, 0, 1])  # two tokens that are known, and four nodes
    step = rows.step([tree, Run(1, 0, 69), Run(2, 1, 3, drafts=[60, 61])])
    batch = step.batch
    assert batch.ids[:6].tolist() == [13, 14, 50, 51, 52, 53]
    assert batch.positions[:6].tolist() == [3, 4, 5, 5, 6, 6]
    assert batch.slots[:6].tolist() == [31, 12, 13, 14, 15, 20]
    assert batch.context_lens.tolist() == [9, 69, 4]
    assert batch.logit_rows.tolist() == [1, 2, 3, 4, 5, 75, 76, 77]
    assert batch.ancestors is not None and batch.ancestors.dtype == np.int64
    assert batch.ancestors[:6].tolist() == [0b1, 0b11, 0b111, 0b1011, 0b10111, 0b101011]
    assert not batch.ancestors[6:75].any() and batch.ancestors[75:].tolist() == [0b1, 0b11, 0b111]
    assert step.parents == {0: [-1, -1, 0, 1]} and step.drafts[2] == [60, 61]
    places = rows.expect(step.sampling, np.array([4, 2], np.int32))
    position = int(places.positions[0])
    assert rows.moved_slots(0, position, tree.drafts, tree.parents, [51, 53, 9]) == [(14, 13), (20, 14)]
    assert rows.moved_slots(0, position, tree.drafts, tree.parents, [50, 9]) == []
    rows.settle(places, [[51, 53, 9], [60]])
    known = rows.known(places, [[51, 53, 9], [60]])
    assert {row: tokens.tolist() for row, tokens in known.items()} == {
        0: [10, 11, 12, 13, 14, 51, 53, 9],
        2: [30, 31, 60],
    }
    rows.retire(0)
    assert rows.held(places).tolist() == [False, True]


def test_rows_with_drafts_beside_rows_without() -> None:
    """Drafts that only the device knows, a row that fails, and one that is given up meanwhile."""
    rows = BatchRows(4, 32, block_size=4)
    for row in range(4):
        rows.admit(admission(row, [10 * row, 10 * row + 1, 10 * row + 2], [row]))
    runs = [
        Run(0, 2, 4, new_blocks=[4], drafts=[UNKNOWN] * 3),
        Run(1, 2, 1),
        Run(2, 2, 2, drafts=[77]),
        Run(3, 2, 3, new_blocks=[5], drafts=[UNKNOWN] * 2),
    ]
    step = rows.step(runs)
    assert step.drafts == {0: [~4, ~8, ~12], 2: [77], 3: [~7, ~11]}
    assert step.batch.ids.tolist() == [2, ~4, ~8, ~12, 12, 22, 77, 32, ~7, ~11]
    assert step.batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    places = rows.expect(step.sampling, np.array([3, 0, 1, 2], np.int32))
    assert rows.num_known.tolist() == [3, 4, 3, 3] and rows.tokens[1, 3] == ~1
    rows.retire(3)
    rows.admit(admission(3, [90, 91, 92, 93], [9]))
    sampled = [[5, 6, 7], [8], [], [1, 2]]
    rows.settle(places, sampled)
    assert {row: tokens.tolist() for row, tokens in rows.known(places, sampled).items()} == {
        0: [0, 1, 2, 5, 6, 7],
        1: [10, 11, 12, 8],
    }
    assert rows.num_known.tolist() == [6, 4, 3, 4] and rows.num_blocks.tolist() == [2, 1, 1, 1]
    assert rows.tokens[3, :4].tolist() == [90, 91, 92, 93]

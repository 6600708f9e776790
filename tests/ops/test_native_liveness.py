"""Values that are live at the same time never share memory; other values do."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.native.liveness import Storage, Use, assign_offsets, needed_for_logits
from trials import rounds


@st.composite
def recordings(draw):
    uses, storages = [], []
    for _ in range(draw(st.integers(1, 25))):
        inputs = draw(st.lists(st.sampled_from(storages), max_size=3)) if storages else []
        output = Storage(draw(st.integers(1, 40)))
        in_place = [s for s in inputs if draw(st.booleans())]
        uses.append(Use(inputs, output, draw(st.booleans()), in_place))
        storages.append(output)
    return uses


@pytest.mark.trial
@given(recordings(), st.integers(1, 9))
@settings(max_examples=rounds(100), deadline=None)
def test_memory_is_reused_only_after_its_last_reader_and_a_barrier(uses, num_rows):
    offsets, size = assign_offsets(uses, num_rows)
    last_use = {s: i for i, use in enumerate(uses) for s in (*use.inputs, use.output)}
    made = [(i, use.output) for i, use in enumerate(uses)]
    for i, later in made:
        assert 0 <= offsets[later] <= size - later.columns * num_rows
        for _, earlier in made[:i]:
            start, end = offsets[earlier], offsets[earlier] + earlier.columns * num_rows
            if offsets[later] + later.columns * num_rows <= start or end <= offsets[later]:
                continue
            if last_use[earlier] == i:  # overwritten by the op that read it last
                assert earlier in uses[i].in_place and earlier.columns == later.columns
            else:
                assert last_use[earlier] < i
                same_rows = offsets[earlier] == offsets[later] and earlier.columns == later.columns
                assert same_rows or any(use.barrier for use in uses[last_use[earlier] : i + 1])


def test_a_chain_needs_memory_for_two_values():
    chain = [Storage(8) for _ in range(20)]
    uses = [Use([], chain[0], True)] + [Use([x], y, True) for x, y in pairwise(chain)]
    assert assign_offsets(uses, num_rows=4)[1] == 2 * 8 * 4


def test_without_barriers_no_memory_is_reused():
    chain = [Storage(8) for _ in range(5)]
    uses = [Use([], chain[0], False)] + [Use([x], y, False) for x, y in pairwise(chain)]
    assert assign_offsets(uses, num_rows=4)[1] == 5 * 8 * 4


def test_what_other_threads_read_for_logits_is_not_overwritten():
    """x is normed for the rows of logits, whose threads are others than those of its rows, and then for a head."""
    x, for_logits, for_head = (Storage(8) for _ in range(3))
    uses = [
        Use([], x, True),
        Use([x], for_logits, False, any_rows=True),
        Use([x], for_head, False, [x], any_rows=True),
        Use([for_head], None, False),
        Use([for_logits], None, True),
    ]
    logits_only = needed_for_logits(uses)
    assert logits_only == {for_logits}
    offsets, _ = assign_offsets(uses, 4, logits_only)
    assert offsets[for_head] != offsets[x]


def test_values_that_only_logits_depend_on():
    """x -> qkv -> (kv written, attention) -> out, added to x -> mlp -> logits, where the second layer is the last."""
    x, qkv1, mid, qkv2, attended, out, total = (Storage(8) for _ in range(7))
    uses = [
        Use([], x, barrier=False),
        Use([x], qkv1, barrier=True, any_rows=True),
        Use([qkv1, qkv1], None, barrier=False),
        Use([qkv1, x], mid, barrier=True, any_rows=True),
        Use([mid], qkv2, barrier=True, any_rows=True),
        Use([qkv2], qkv2, barrier=False),  # rotated in place
        Use([qkv2, qkv2], None, barrier=False),
        Use([qkv2], attended, barrier=True, any_rows=True),
        Use([attended], out, barrier=True, any_rows=True),
        Use([mid, out], total, barrier=False, in_place=[mid, out], any_rows=True),
        Use([total], None, barrier=True),
    ]
    few = needed_for_logits(uses)
    assert few == {attended, out, total}
    offsets, _ = assign_offsets(uses, 4, few)
    assert offsets[total] == offsets[out] != offsets[mid]  # rows of mid are not where rows of total are

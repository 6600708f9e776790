"""LoRA of a linear layer, in C++: against fp64, and independent of the batch and the number of threads."""

import numpy as np
import pytest

from ops.low_rank import RNG, added, bfloats, fp16_values, low_rank, random, stored_floats
from ops.native_harness import SPEC, Pool, int32, max_error, stored
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import ProgramSpec

INPUTS, SIZES = 72, (40, 8, 21)
OUTPUTS = sum(SIZES)


@pytest.fixture(params=available_isas(), autouse=True)
def each_isa(request):
    use_isa(request.param)
    yield request.param
    use_isa(available_isas()[0])


def adapters_of(store=stored_floats):
    """Adapters with three parts of different ranks, one part of rank 1, no parts in this layer, and a large rank."""
    sizes = list(SIZES)
    return [
        [low_rank(rank, INPUTS, size, 0.5 * rank, store) for rank, size in zip((5, 16, 2), sizes, strict=True)],
        [None, low_rank(1, INPUTS, sizes[1], 3.0, store), None],
        [None, None, None],
        [low_rank(64, INPUTS, sizes[0], 0.1, store), None, low_rank(33, INPUTS, sizes[2], -1.0, store)],
    ]


WEIGHT = random(OUTPUTS, INPUTS)


def program(parts, x, threads=2):
    """-> (slots, a function of (rows, adapters): the rows of x times WEIGHT, adapted)"""
    ops = NativeOps(threads)
    slots = ops.new_slots(INPUTS, SIZES, num_slots=len(parts), max_rank=64)
    for slot, each in enumerate(parts):
        slots.put(slot, slots.pack(each))
    table, weight, eye = ops.table(stored(x)), ops.pack([stored(WEIGHT)]), ops.pack([stored(np.eye(OUTPUTS))])

    def forward(recorder, batch):
        value = recorder.embedding(batch.ids, table)
        return recorder.logits(recorder.adapt(recorder.linear(value, weight), value, slots, batch), eye, batch)

    compiled = ops.compile(forward, ops.new_cache(SPEC, 64), ProgramSpec(len(x)))

    def run(rows, adapters, logit_rows=None):
        batch = Pool(SPEC, 64).batch([(0, list(rows))])
        batch.adapters = None if adapters is None else int32(adapters)
        if logit_rows is not None:
            batch.logit_rows = int32(logit_rows)
        return compiled.run(batch).copy()

    return slots, run


@pytest.mark.parametrize(("store", "bound"), [(stored_floats, 2e-6), (fp16_values, 2e-6), (bfloats, 2e-6)])
@pytest.mark.parametrize("num_rows", [1, 3, 50])
def test_lora_equals_fp64(store, bound, num_rows):
    x, parts = random(num_rows, INPUTS), adapters_of(store)
    _, run = program(parts, x)
    for adapters in (RNG.integers(-1, 4, num_rows), [0] * num_rows, [3] * num_rows):
        expected = x.astype(np.float64) @ WEIGHT.T.astype(np.float64) + added(x, adapters, parts, SIZES)
        assert max_error(run(range(num_rows), adapters), expected) < bound * np.abs(expected).max()


def test_batch_and_threads_change_no_bit_of_a_row():
    x, parts = random(50, INPUTS), adapters_of()
    adapters = RNG.integers(-1, 4, 50)
    together = program(parts, x, threads=3)[1](range(50), adapters)
    _, run = program(parts, x, threads=1)
    assert np.array_equal(run(range(50), adapters), together)
    for rows in ([0], [17], range(30, 50), [41, 3, 22]):
        assert np.array_equal(run(rows, adapters[list(rows)]), together[list(rows)])


def test_rows_without_an_adapter_are_unchanged():
    x, parts = random(9, INPUTS), adapters_of()
    _, run = program(parts, x)
    plain = run(range(9), None)
    assert np.array_equal(run(range(9), [-1] * 9), plain)
    assert np.array_equal(run(range(9), [2] * 9), plain)  # an adapter without parts in this layer
    mixed = run(range(9), [0, -1, 0, -1, 1, -1, 3, -1, 2])
    assert np.array_equal(mixed[[1, 3, 5, 7, 8]], plain[[1, 3, 5, 7, 8]])
    assert np.all(np.abs(mixed - plain)[[0, 2, 4, 6]].max(axis=1) > 0.1)


def test_only_rows_with_requested_logits_are_computed():
    x, parts = random(9, INPUTS), adapters_of()
    _, run = program(parts, x)
    adapters = [0, 1, 3, -1, 3, 0, 1, -1, 0]
    every = run(range(9), adapters)
    assert np.array_equal(run(range(9), adapters, logit_rows=[7, 2, 0, 8]), every[[7, 2, 0, 8]])


def test_a_slot_is_replaced_and_emptied_between_steps():
    x, parts = random(4, INPUTS), adapters_of()
    slots, run = program(parts, x)
    third = run(range(4), [3] * 4)
    slots.put(0, slots.pack(parts[3]))
    assert np.array_equal(run(range(4), [0, 3, 0, 3]), third)
    slots.put(0, None)
    assert np.array_equal(run(range(4), [0, 0, 0, -1]), run(range(4), None))


def test_a_slot_out_of_range_is_refused():
    _, run = program(adapters_of(), random(2, INPUTS))
    for wrong in (4, -2):
        with pytest.raises(ValueError, match=r"adapters\[0\] is "):
            run(range(2), [wrong, 0])
    with pytest.raises(ValueError, match="adapters has 1 entries"):
        run(range(2), [0])

"""MoE in C++ against plain torch, and independent of the batch and the number of threads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.native_harness import SPEC, Pool, apply, int32, max_error, stored
from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import Activation, ProgramSpec, Routing
from quire.ops.reference import TorchOps
from quire.ops.reference.routing import choose_experts
from quire.ops.tensors import F16, Q8_0, StoredTensor

RNG = np.random.default_rng(11)
COLUMNS, INNER, EXPERTS = 64, 32, 8


@pytest.fixture(params=available_isas(), autouse=True)
def each_isa(request):
    use_isa(request.param)
    yield request.param
    use_isa(available_isas()[0])


def random(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def halves(array):
    half = array.astype(np.float16)
    return StoredTensor("", array.shape, F16, half.view(np.uint8))


def codes(array):
    groups = array.reshape(len(array), -1, 32)
    scales = (np.abs(groups).max(axis=2) / 127).astype(np.float16)
    codes = np.round(groups / scales[..., None].astype(np.float32)).astype(np.int8)
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes.view(np.uint8)], axis=2)
    return StoredTensor("", array.shape, Q8_0, blocks.reshape(len(array), -1))


def experts(stack, store):
    """Each in two parts."""
    middle = stack.shape[1] // 2
    return [[store(w[:middle]), store(w[middle:])] for w in stack]


GATE_UP, DOWN = random(EXPERTS, 2 * INNER, COLUMNS) * 0.3, random(EXPERTS, COLUMNS, INNER) * 0.3
ROUTINGS = {
    "one": Routing(1),
    "softmax": Routing(2),
    "renormalized": Routing(3, renormalize=True),
    "sigmoid": Routing(2, scoring="sigmoid", renormalize=True, scale=2.5),
    "groups": Routing(3, num_groups=4, top_groups=2),
    "two of groups": Routing(3, scoring="sigmoid", num_groups=2, top_groups=1, group_score="best two"),
    "all": Routing(EXPERTS),
    "near": Routing(2, sparsemixer_threshold=0.7),
}


def moe(gate_up, down, routing, correction=None, kind=Activation.SILU):
    """An op on rows whose first columns are x and whose last columns are router logits."""
    return lambda recorder, x, batch: recorder.moe(
        *recorder.split(x, [COLUMNS, EXPERTS]), gate_up, down, routing, kind, correction
    )


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 45])
def test_moe_equals_plain_torch(name, num_rows):
    x, correction = random(num_rows, COLUMNS + EXPERTS), random(EXPERTS) * 0.2
    stacks = [experts(stack, stored) for stack in (GATE_UP, DOWN)]
    packed, plain = [NativeOps().pack_experts(s) for s in stacks], [TorchOps().pack_experts(s) for s in stacks]
    output = apply(moe(*packed, ROUTINGS[name], correction), x)
    op = moe(*plain, ROUTINGS[name], torch.tensor(correction))
    expected = op(TorchOps(), torch.tensor(x), None)
    assert max_error(output, expected.numpy()) < 2e-5 * np.abs(expected.numpy()).max() + 1e-6


@pytest.mark.parametrize(("store", "bound"), [(halves, 2e-3), (codes, 2e-2)])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_experts_may_be_stored_in_any_type(store, bound, num_rows):
    x = random(num_rows, COLUMNS + EXPERTS)
    stacks = [experts(stack, store) for stack in (GATE_UP, DOWN)]
    packed, plain = [NativeOps().pack_experts(s) for s in stacks], [TorchOps().pack_experts(s) for s in stacks]
    assert packed[0].nbytes < 0.6 * plain[0].nbytes
    output = apply(moe(*packed, Routing(2), kind=Activation.GELU_TANH), x)
    expected = moe(*plain, Routing(2), kind=Activation.GELU_TANH)(TorchOps(), torch.tensor(x), None).numpy()
    assert np.linalg.norm(output - expected) < bound * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", [Activation.SILU, Activation.CLAMPED_SWIGLU])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_experts_may_have_biases(kind, num_rows):
    x, output, expected = random(num_rows, COLUMNS + EXPERTS) * 4, [], []
    for stack in (GATE_UP, DOWN):
        biases = experts(random(EXPERTS, stack.shape[1]) * 2, stored)
        output.append(NativeOps().pack_experts(experts(stack, stored), biases))
        expected.append(TorchOps().pack_experts(experts(stack, stored), biases))
    plain = moe(*expected, Routing(2), kind=kind)(TorchOps(), torch.tensor(x), None).numpy()
    assert max_error(apply(moe(*output, Routing(2), kind=kind), x), plain) < 2e-5 * np.abs(plain).max()


@pytest.mark.parametrize(("store", "bound"), [(stored, 1e-5), (halves, 2e-3), (codes, 2e-2)])
def test_an_expert_may_have_an_input_order(store, bound):
    """As with act-order: stored column k is input order[k]."""
    x, rng = random(23, COLUMNS + EXPERTS), np.random.default_rng(3)
    output, expected = [], []
    for stack in (GATE_UP, DOWN):
        orders = [rng.permutation(stack.shape[2]).astype(np.int32) for _ in stack]
        both = zip(experts(stack, store), orders, strict=True)
        reordered = [[replace(part, column_order=order) for part in parts] for parts, order in both]
        output.append(NativeOps().pack_experts(reordered))
        straight = np.stack([w[:, np.argsort(order)] for w, order in zip(stack, orders, strict=True)])
        expected.append(TorchOps().pack_experts(experts(straight, stored)))
    plain = moe(*expected, Routing(2))(TorchOps(), torch.tensor(x), None).numpy()
    assert np.linalg.norm(apply(moe(*output, Routing(2)), x) - plain) < bound * np.linalg.norm(plain)
    with pytest.raises(Unsupported, match="different orders"):
        NativeOps().pack_experts([[reordered[0][0], reordered[1][1]]])


@pytest.mark.parametrize("store", [stored, halves, codes])
def test_batch_and_threads_change_no_bit_of_a_row(store):
    x = random(50, COLUMNS + EXPERTS)
    packed = [NativeOps().pack_experts(experts(stack, store)) for stack in (GATE_UP, DOWN)]
    op = moe(*packed, Routing(2, renormalize=True))
    together = apply(op, x, threads=3)
    assert np.array_equal(apply(op, x, threads=1), together)
    for first, last in ((0, 1), (17, 18), (30, 50)):
        assert np.array_equal(apply(op, x[first:last]), together[first:last])


def test_only_rows_with_requested_logits_are_computed():
    x, ops = random(9, COLUMNS + EXPERTS), NativeOps(2)
    packed = [ops.pack_experts(experts(stack, stored)) for stack in (GATE_UP, DOWN)]
    op, table, head = moe(*packed, Routing(2)), ops.table(stored(x)), ops.pack([stored(np.eye(COLUMNS))])
    forward = lambda o, batch: o.logits(op(o, o.embedding(batch.ids, table), batch), head, batch)  # noqa: E731
    program = ops.compile(forward, ops.new_cache(SPEC, 4), ProgramSpec(9))
    batch = Pool(SPEC, 4).batch([(0, range(9))])
    every = program.run(batch).copy()
    batch.logit_rows = int32([7, 2])
    assert np.array_equal(program.run(batch), every[[7, 2]])


def test_ties_go_to_the_lower_expert_and_nan_logits_stay_in_their_row():
    x = random(4, COLUMNS + EXPERTS)
    x[1, COLUMNS:] = 0.0
    x[2, COLUMNS:] = np.nan
    packed = [NativeOps().pack_experts(experts(stack, stored)) for stack in (GATE_UP, DOWN)]
    plain = [TorchOps().pack_experts(experts(stack, stored)) for stack in (GATE_UP, DOWN)]
    output = apply(moe(*packed, Routing(2)), x)
    ids, _ = choose_experts(torch.tensor(x[1:2, COLUMNS:]), Routing(2))
    assert ids.tolist() == [[0, 1]]
    whole = [0, 1, 3]
    expected = moe(*plain, Routing(2))(TorchOps(), torch.tensor(x[whole]), None).numpy()
    np.testing.assert_allclose(output[whole], expected, rtol=1e-4, atol=1e-5)
    assert np.isnan(output[2]).all()


@pytest.mark.parametrize(
    "routing",
    [
        Routing(EXPERTS + 1),
        Routing(0),
        Routing(2, num_groups=3),
        Routing(3, num_groups=4, top_groups=1),
        Routing(1, num_groups=EXPERTS, top_groups=2, group_score="best two"),
    ],
)
def test_impossible_routings_are_refused(routing):
    with pytest.raises(BadCheckpoint, match="expert"):
        routing.check(EXPERTS)

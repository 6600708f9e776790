"""Each row-wise op against plain arithmetic, in every ISA."""

import numpy as np
import pytest
import torch

from ops.native_harness import SPEC, Pool, apply, assert_close, int32, stored
from quire.ops.native import NativeOps, available_isas, isa, use_isa
from quire.ops.opset import Activation, ProgramSpec
from quire.ops.reference import TorchOps
from quire.ops.tensors import F16, StoredTensor

RNG = np.random.default_rng(7)
TORCH = TorchOps()


@pytest.fixture(params=available_isas(), autouse=True)
def each_isa(request):
    use_isa(request.param)
    yield request.param
    use_isa(available_isas()[0])


def rows(num_rows, columns, scale=1.0):
    return (RNG.standard_normal((num_rows, columns)) * scale).astype(np.float32)


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 8), (2, 13), (7, 576), (33, 1)])
def test_rms_norm(num_rows, columns):
    x, weight = rows(num_rows, columns, 3), rows(1, columns)[0]

    def plain(x, weight):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + x.dtype.type(1e-5)) * weight

    out = apply(lambda ops, x, batch: ops.rms_norm(x, weight, 1e-5), x)
    assert_close(out, plain(x, weight), plain(x.astype(np.float64), weight.astype(np.float64)))


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 8), (5, 13), (9, 64)])
def test_rms_norm_of_heads_that_are_columns_of_a_wider_value(heads, head_dim):
    x, weight = rows(5, heads * head_dim + 6), rows(1, head_dim)[0]
    sizes = [4, heads * head_dim, 2]
    out = apply(lambda ops, x, batch: ops.rms_norm(ops.split(x, sizes)[1], weight, 1e-5), x)
    inside = torch.tensor(x[:, 4:-2])
    plain = TORCH.rms_norm(inside, torch.tensor(weight), 1e-5)
    assert_close(out, plain, TORCH.rms_norm(inside.double(), torch.tensor(weight).double(), 1e-5))


@pytest.mark.parametrize(
    ("num_rows", "columns", "groups"), [(1, 8, 1), (2, 13, 1), (7, 576, 1), (5, 60, 4), (33, 1, 1)]
)
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm(num_rows, columns, groups, has_weight, has_bias):
    x = rows(num_rows, columns, 3) + np.float32(5)
    weight = rows(1, columns // groups)[0] if has_weight else None
    bias = rows(1, columns)[0] if has_bias else None
    out = apply(lambda ops, x, batch: ops.layer_norm(x, weight, bias, 1e-5, groups), x)

    def plain(dtype):
        w, b = (None if v is None else torch.tensor(v, dtype=dtype) for v in (weight, bias))
        return TORCH.layer_norm(torch.tensor(x, dtype=dtype), w, b, 1e-5, groups)

    assert_close(out, plain(torch.float32), plain(torch.float64))


@pytest.mark.parametrize("kind", list(Activation))
@pytest.mark.parametrize(("num_rows", "columns"), [(1, 1), (2, 5), (7, 1536), (33, 24)])
def test_activations(kind, num_rows, columns):
    x = rows(num_rows, 2 * columns, 4)
    x[0, 0] = -200.0  # exp overflows fp32
    x[-1, 0] = 100.0
    wide = torch.tensor(x)
    plain, truth = TORCH.activate(wide, kind), TORCH.activate(wide.double(), kind)
    assert_close(apply(lambda ops, x, batch: ops.activate(x, kind), x), plain, truth)
    plain, truth = TORCH.activate_and_mul(wide, kind), TORCH.activate_and_mul(wide.double(), kind)
    assert_close(apply(lambda ops, x, batch: ops.activate_and_mul(x, kind), x), plain, truth)


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 3), (7, 100)])
def test_scale_clamp_and_mul_sigmoid(num_rows, columns):
    x = rows(num_rows, columns + 1)
    assert np.array_equal(apply(lambda ops, x, batch: ops.scale(x, 0.3), x), x * np.float32(0.3))
    assert np.array_equal(apply(lambda ops, x, batch: ops.clamp(x, 0.5), x), np.clip(x, -0.5, 0.5))
    out = apply(lambda ops, x, batch: ops.mul_sigmoid(*ops.split(x, [columns, 1])), x)
    wide = x.astype(np.float64)
    assert_close(out, x[:, :-1] / (1 + np.exp(-x[:, -1:])), wide[:, :-1] / (1 + np.exp(-wide[:, -1:])))


@pytest.mark.parametrize("columns", [1, 19])
def test_softcapped_logits(columns):
    x, ops = rows(5, columns, 40), NativeOps(2)
    table, head = ops.table(stored(x)), ops.pack([stored(np.eye(columns))], [stored(np.ones(columns))])
    program = ops.compile(
        lambda ops, batch: ops.logits(ops.embedding(batch.ids, table), head, batch, softcap=30.0),
        ops.new_cache(SPEC, 4),
        ProgramSpec(9),
    )
    out = program.run(Pool(SPEC, 4).batch([(0, range(5))]))
    assert_close(out, 30 * np.tanh((x + 1) / 30), 30 * np.tanh((x.astype(np.float64) + 1) / 30))


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 3), (7, 100)])
def test_add_is_exact(num_rows, columns):
    x = rows(num_rows, 2 * columns)
    out = apply(lambda ops, x, batch: ops.add(*ops.split(x, [columns, columns])), x)
    assert np.array_equal(out, x[:, :columns] + x[:, columns:])


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"), [(9, 64, 64), (14, 80, 40), (1, 128, 128), (2, 12, 6), (3, 256, 256)]
)
def test_rope_rotates_pairs_of_columns(heads, head_dim, rotary_dim):
    half = rotary_dim // 2
    x, inv_freq = rows(7, heads * head_dim), (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    positions = int32([0, 1, 2, 77, 500, 2047, 8000])

    def plain(x, dtype):
        angles = (positions[:, None].astype(np.float32) * inv_freq).astype(
            dtype
        )  # fp32 multiplications in every version
        cos, sin = (1.5 * f(angles)[:, None] for f in (np.cos, np.sin))
        x = x.reshape(7, heads, head_dim).astype(dtype)
        low, high, rest = np.split(x, [half, rotary_dim], axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=2).reshape(7, -1)

    frequencies = NativeOps().frequencies(inv_freq, 1.5)
    out = apply(
        lambda ops, x, batch: ops.rope(x, ops.rope_angles(batch.positions, frequencies), head_dim), x, positions
    )
    assert_close(out, plain(x, np.float32), plain(x, np.float64))


def test_linear_stacks_parts_of_different_types_and_adds_the_bias():
    """A matrix of fp32 and one of fp16, one with its rows permuted."""
    x, first, second, bias = rows(5, 64), rows(19, 64), rows(33, 64), rows(1, 52)[0]
    halves = second.astype(np.float16)
    order = RNG.permutation(33)
    inverse = int32(np.argsort(order))
    parts = [stored(first), StoredTensor("", second.shape, F16, halves[order].view(np.uint8), row_order=inverse)]
    ops = NativeOps()
    packed = ops.pack(parts, [stored(bias[:19]), stored(bias[19:])])
    weight = np.concatenate([first, halves.astype(np.float32)])
    out = apply(lambda ops, x, batch: ops.linear(x, packed), x)
    assert (packed.num_outputs, packed.num_inputs, len(packed.packed)) == (52, 64, 2)
    truth = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    assert_close(out[:, :19], (x @ weight.T + bias)[:, :19], truth[:, :19])
    assert np.linalg.norm(out - truth) < 0.0015 * np.linalg.norm(truth)  # fp16 may be summed in fp16


def test_parts_of_one_type_become_one_matrix():
    first, second = rows(10, 32), rows(6, 32)
    order = int32(RNG.permutation(6))
    part = StoredTensor("", second.shape, stored(second).type, stored(second).data, row_order=order)
    packed = NativeOps().pack([stored(first), part])
    assert len(packed.packed) == 1
    x = np.eye(32, dtype=np.float32)
    out = apply(lambda ops, x, batch: ops.linear(x, packed), x)
    assert np.array_equal(out.T, np.concatenate([first, second[order]]))


def test_embedding_gathers_rows_in_the_stored_type_and_order():
    weights = rows(11, 24).astype(np.float16)
    order = int32(RNG.permutation(11))
    ops = NativeOps()
    table = ops.table(StoredTensor("", weights.shape, F16, weights.view(np.uint8), row_order=order))
    head = ops.pack([stored(np.eye(24))])
    program = ops.compile(
        lambda ops, batch: ops.logits(ops.embedding(batch.ids, table), head, batch),
        ops.new_cache(SPEC, 4),
        ProgramSpec(9),
    )
    ids = [3, 3, 0, 10, 7]
    out = program.run(Pool(SPEC, 4).batch([(0, ids)]))
    assert np.array_equal(out, weights[order[ids]].astype(np.float32))


def test_learned_positions_are_looked_up_and_checked():
    ops, x = NativeOps(), rows(6, 8)
    table, head = ops.table(stored(x)), ops.pack([stored(np.eye(8))])
    program = ops.compile(
        lambda ops, batch: ops.logits(ops.embedding(batch.positions, table), head, batch),
        ops.new_cache(SPEC, 4),
        ProgramSpec(9),
    )
    batch = Pool(SPEC, 4).batch([(0, [50, 60, 70])])
    batch.positions = int32([5, 0, 4])
    assert np.array_equal(program.run(batch), x[[5, 0, 4]])
    batch.positions = int32([5, 0, 6])
    with pytest.raises(ValueError, match=r"positions\[2\] is 6, and must be in \[0, 6\)"):
        program.run(batch)


def test_the_chosen_instruction_set_is_used(each_isa):
    assert isa() == each_isa


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(Exception, match="choose one of"):
        use_isa("mmx")

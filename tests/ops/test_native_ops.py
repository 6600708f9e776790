"""Each op that works on rows, against plain arithmetic, in every instruction set."""

import numpy as np
import pytest

from ops.native_harness import SPEC, Pool, apply, assert_close, int32, stored
from quire.ops.native import NativeOps, available_isas, isa, use_isa
from quire.ops.opset import Activation
from quire.ops.tensors import F16, StoredTensor

RNG = np.random.default_rng(7)


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


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 1), (2, 5), (7, 1536), (33, 24)])
def test_silu_and_mul(num_rows, columns):
    x = rows(num_rows, 2 * columns, 4)
    x[0, 0] = -200.0  # exp overflows fp32

    def plain(x):
        with np.errstate(over="ignore"):
            return x[:, :columns] / (1 + np.exp(-x[:, :columns])) * x[:, columns:]

    assert_close(
        apply(lambda ops, x, batch: ops.activate_and_mul(x, Activation.SILU), x), plain(x), plain(x.astype(np.float64))
    )


@pytest.mark.parametrize(("num_rows", "columns"), [(1, 3), (7, 100)])
def test_add_is_exact(num_rows, columns):
    x = rows(num_rows, 2 * columns)
    out = apply(lambda ops, x, batch: ops.add(*ops.split(x, [columns, columns])), x)
    assert np.array_equal(out, x[:, :columns] + x[:, columns:])


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"), [(9, 64, 64), (14, 80, 40), (1, 128, 128), (2, 12, 6), (3, 256, 256)]
)
def test_rope_turns_pairs_of_columns(heads, head_dim, rotary_dim):
    half = rotary_dim // 2
    x, inv_freq = rows(7, heads * head_dim), (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    positions = int32([0, 1, 2, 77, 500, 2047, 8000])

    def plain(x, dtype):
        angles = (positions[:, None].astype(np.float32) * inv_freq).astype(dtype)  # fp32 products in every version
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
    """A matrix of floats and one of halves, one with its rows permuted."""
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
    assert np.linalg.norm(out - truth) < 0.0015 * np.linalg.norm(truth)  # halves may be added up in halves


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
        lambda ops, batch: ops.logits(ops.embedding(batch.ids, table), head, batch), ops.new_cache(SPEC, 4), 9
    )
    ids = [3, 3, 0, 10, 7]
    out = program.run(Pool(SPEC, 4).batch([(0, ids)]))
    assert np.array_equal(out, weights[order[ids]].astype(np.float32))


def test_the_chosen_instruction_set_is_used(each_isa):
    assert isa() == each_isa


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(Exception, match="choose one of"):
        use_isa("mmx")

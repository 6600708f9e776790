"""Inputs that reach the threshold of a matrix are multiplied in fp32, row by row, and never change another row."""

from dataclasses import replace

import numpy as np
import pytest

from ops.native_harness import SPEC, Pool, apply, int32, max_error, stored
from ops.stored_blocks import stored_rows
from quire import _native
from quire.core.errors import Unsupported
from quire.ops.dequantize import dequantize
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import Activation, ProgramSpec, Routing
from quire.ops.tensors import Q8_0, STORAGE_TYPES, StoredTensor

THRESHOLD = 6.0
EXPERTS = 3


@pytest.fixture(params=available_isas(), autouse=True)
def each_isa(request):
    use_isa(request.param)
    yield request.param
    use_isa(available_isas()[0])


def matrix(outputs, inputs, kind="Q8_F", seed=0, threshold=THRESHOLD):
    data = stored_rows(STORAGE_TYPES[kind], outputs, inputs, seed)
    codes = data.reshape(outputs, inputs // 32, -1)[..., -32:]
    codes[:] = np.random.default_rng(seed).integers(0, 256, codes.shape)
    return StoredTensor(f"w{seed}", (outputs, inputs), STORAGE_TYPES[kind], data, threshold=threshold)


def activations(rows, inputs, seed=0):
    """Outliers in most rows: none in the first, one that just reaches the threshold in the second, a whole group of
    them in the third, nothing else in the fourth."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    x = np.clip(x, -5, 5)
    x[4:] = np.where(rng.random((max(rows - 4, 0), inputs)) < 0.05, x[4:] * 40, x[4:])
    x[1:2, inputs // 2] = -THRESHOLD
    x[1:2, 0] = np.nextafter(np.float32(THRESHOLD), np.float32(0))
    x[2:3, inputs - 32 :] = 7.5
    x[3:4] = 100
    return x


def rounded(x):
    """Quantized to 8 bits in groups of 32, with the kernel's fp32 steps."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(1e-20))
    codes = np.rint(groups * (np.float32(127) / largest)).astype(np.float64)
    return (codes * (largest / np.float32(127))).reshape(x.shape)


def plain(x, w, threshold=THRESHOLD):
    apart = np.abs(x) >= threshold
    seen = np.where(apart, x.astype(np.float64), rounded(np.where(apart, np.float32(0), x)))
    return seen @ w.T.astype(np.float64)


def linear(parts, bias=None):
    packed = NativeOps().pack(parts, None if bias is None else [stored(bias)])
    return lambda recorder, x, batch: recorder.linear(x, packed)


def close(output, expected):
    """Equal up to the rounding of fp32 sums of hundreds to thousands of terms."""
    return max_error(output, expected) < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["Q8_F", "Q8_0"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 32), (2, 33, 96), (7, 100, 288), (41, 47, 1056)])
def test_matmuls_equal_plain_arithmetic(kind, rows, outputs, inputs):
    w, x = matrix(outputs, inputs, kind), activations(rows, inputs)
    bias = np.linspace(-3, 3, outputs, dtype=np.float32)
    weights = NativeOps().pack([w]).packed[0].dequantized()
    assert close(apply(linear([w], bias), x), plain(x, weights) + bias)
    if rows > 1:
        assert not close(apply(linear([replace(w, threshold=0.0)], bias), x), plain(x, weights) + bias)


def test_outliers_cost_their_neighbours_no_precision():
    w, x = matrix(64, 512), np.clip(activations(9, 512), -5, 5)
    x[:, ::100] = 500
    truth = x.astype(np.float64) @ dequantize(w).T
    error, rounded_too = (max_error(apply(linear([m]), x), truth) for m in (w, replace(w, threshold=0.0)))
    assert error < 0.1 * rounded_too


def test_batch_and_threads_change_no_bit_of_a_row():
    x, op = activations(37, 288), linear([matrix(100, 288)])
    together = apply(op, x, threads=2)
    for threads in (1, 3):
        assert np.array_equal(apply(op, x, threads=threads), together)
    for first, last in ((0, 1), (1, 2), (2, 3), (3, 5), (20, 37)):
        assert np.array_equal(apply(op, x[first:last]), together[first:last])


def test_every_table_gives_the_same_bits(each_isa):
    x, op = activations(21, 288), linear([matrix(100, 288), matrix(9, 288, "Q8_0", 1)])
    output = apply(op, x)
    use_isa("plain")
    assert np.array_equal(apply(op, x), output)
    use_isa(each_isa)


def test_rows_without_outliers_are_computed_as_without_a_threshold():
    x, w = activations(12, 288), matrix(100, 288)
    assert np.array_equal(apply(linear([w]), x)[:1], apply(linear([replace(w, threshold=0.0)]), x)[:1])
    quiet = x[:1].repeat(12, axis=0)
    assert np.array_equal(apply(linear([w]), quiet), apply(linear([replace(w, threshold=0.0)]), quiet))


def test_parts_of_one_matrix_may_differ_in_all_but_their_inputs():
    """Floats among quantized parts, another threshold, none, and an input order."""
    x, inputs = activations(11, 96), 96
    order = np.random.default_rng(3).permutation(inputs).astype(np.int32)
    floats = np.random.default_rng(4).standard_normal((20, inputs)).astype(np.float32)
    parts = [
        matrix(33, inputs),
        stored(floats),
        matrix(17, inputs, seed=1, threshold=50.0),
        matrix(5, inputs, seed=2, threshold=0.0),
        replace(matrix(40, inputs, seed=3), column_order=order),
        matrix(16, inputs, "Q8_0", seed=4),
    ]
    segments = [s.dequantized() for s in NativeOps().pack(parts).packed]
    limits = [THRESHOLD, 0, 50.0, np.inf, THRESHOLD, THRESHOLD]
    expected = [plain(x, w, limit) for w, limit in zip(segments, limits, strict=True)]
    expected[4] = plain(x[:, order], segments[4][:, order])
    assert close(apply(linear(parts), x), np.concatenate(expected, axis=1))


def test_only_rows_with_requested_logits_are_computed():
    x, w, ops = activations(9, 96), matrix(33, 96), NativeOps(2)
    table, head = ops.table(stored(x)), ops.pack([w])
    program = ops.compile(
        lambda o, b: o.logits(o.embedding(b.ids, table), head, b), ops.new_cache(SPEC, 8), ProgramSpec(9)
    )
    batch = Pool(SPEC, 8).batch([(0, range(9))])
    batch.logit_rows = int32([2, 8])
    assert np.array_equal(program.run(batch), apply(linear([w]), x)[[2, 8]])


# -- MoE ---------------------------------------------------------------------------------------------------------------


def moe(threshold):
    """Quantized experts, and one of floats."""
    stacks = []
    for n, k in ((2 * 64, 96), (50, 64)):
        codes = [[matrix(n, k, seed=20 + e, threshold=threshold)] for e in range(EXPERTS - 1)]
        stacks.append([*codes, [stored(np.random.default_rng(9).standard_normal((n, k)) * 0.3)]])
    gate_up, down = (NativeOps().pack_experts(stack) for stack in stacks)
    weights = [[dequantize(parts[0]).reshape(parts[0].shape) for parts in stack] for stack in stacks]

    def op(recorder, x, batch):
        return recorder.moe(*recorder.split(x, [96, EXPERTS]), gate_up, down, Routing(2), Activation.SILU)

    return op, weights


def plain_moe(x, logits, weights):
    """In fp64, without rounding of floats."""
    out = np.zeros((len(x), 50))
    for r in range(len(x)):
        scores = np.exp(logits[r].astype(np.float64))
        for e in np.argsort(-scores)[:2]:
            product = (lambda a, w: a @ w.T.astype(np.float64)) if e == EXPERTS - 1 else plain
            gate, up = np.split(product(x[r : r + 1], weights[0][e])[0], 2)
            hidden = (gate * (1 + np.tanh(gate / 2)) / 2 * up).astype(np.float32)[None]
            out[r] += scores[e] / scores.sum() * product(hidden, weights[1][e])[0]
    return out


def test_experts_have_thresholds_too():
    """Both matmuls have outliers: the hidden values are large."""
    x, logits = activations(13, 96), np.random.default_rng(1).standard_normal((13, EXPERTS)).astype(np.float32)
    rows = np.concatenate([x, logits], axis=1)
    op, weights = moe(THRESHOLD)
    output, expected = apply(op, rows), plain_moe(x, logits, weights)
    # Sometimes an input of the second matmul is near a rounding boundary, or near the threshold.
    assert np.linalg.norm(output - expected) < 3e-4 * np.linalg.norm(expected)
    without = apply(moe(0.0)[0], rows)
    assert np.linalg.norm(without - expected) > 1e-3 * np.linalg.norm(expected)
    for threads in (1, 3):
        assert np.array_equal(apply(op, rows, threads=threads), output)
    for r in (0, 1, 3, 12):
        assert np.array_equal(apply(op, rows[r : r + 1])[0], output[r])


def test_experts_whose_parts_have_different_thresholds_are_refused():
    with pytest.raises(Unsupported, match="different thresholds"):
        NativeOps().pack_experts([[matrix(32, 32), matrix(32, 32, seed=1, threshold=2.0)]])


@pytest.mark.parametrize(
    ("kind", "threshold", "said"), [("Q4_0", 6.0, "Q4_0"), ("Q8_M", 6.0, "Q8_M"), ("Q8_0", -1, "-1")]
)
def test_unsupported_thresholds_are_refused(kind, threshold, said):
    data = stored_rows(STORAGE_TYPES[kind], 4, 32)
    with pytest.raises(ValueError, match=said):
        _native.Matrix(kind, [data], 32, threshold=threshold)
    with pytest.raises(ValueError, match="only a tape supports"):
        w = _native.Matrix("Q8_0", [stored_rows(Q8_0, 4, 32)], 32, threshold=6.0)
        _native.multiply(w, np.zeros((1, 32), np.float32))

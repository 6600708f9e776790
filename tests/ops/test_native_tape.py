"""A whole forward pass: the tape against the same function in numpy, and independent of the batch."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ops.native_harness import Pool, int32, max_error, stored
from quire.ops.kv_spec import KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import Activation, ProgramSpec
from quire.ops.tensors import Q8_0, StoredTensor

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB, LAYERS = 6, 2, 32, 96, 160, 50, 2
SPEC = KVSpec(LAYERS, KV_HEADS, HEAD_DIM, block_size=16, dtype="float32")
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def q8_0(array):
    """Quantized in groups of 32 with a scale, and the dequantized values."""
    groups = array.reshape(*array.shape[:-1], -1, 32)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(groups / np.maximum(scale.astype(np.float32), 1e-8)).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1).reshape(array.shape[0], -1)
    return StoredTensor("", array.shape, Q8_0, data), (codes * scale.astype(np.float32)).reshape(array.shape)


@dataclass
class Weights:
    embed: object
    layers: list
    norm: object
    head: object
    inv_freq: object


def tiny_llama(ops, seed=0, quantized=False):
    """-> packed weights, and the same as floats."""
    rng = np.random.default_rng(seed)
    floats = Weights(None, [], None, None, (10000.0 ** (-np.arange(16) / 16)).astype(np.float32))
    packed = replace(floats, layers=[], inv_freq=ops.frequencies(floats.inv_freq, 1.0))

    def matrix(outputs, inputs, bias=False):
        w = (rng.standard_normal((outputs, inputs)) * inputs**-0.5).astype(np.float32)
        b = rng.standard_normal(outputs).astype(np.float32) if bias else np.zeros(outputs, np.float32)
        tensor, w = q8_0(w) if quantized else (stored(w), w)
        return (w, b), ops.pack([tensor], [stored(b)] if bias else None)

    def vector(n):
        v = (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)
        return v, ops.vector(stored(v))

    embed = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    floats.embed, packed.embed = embed, ops.table(stored(embed))
    for _ in range(LAYERS):
        shapes = {
            "qkv": (Q + 2 * KV, HIDDEN, True),
            "o": (HIDDEN, Q),
            "gate_up": (2 * INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }
        made = {name: matrix(*shape) for name, shape in shapes.items()} | {
            "norm1": vector(HIDDEN),
            "norm2": vector(HIDDEN),
        }
        floats.layers.append({name: pair[0] for name, pair in made.items()})
        packed.layers.append({name: pair[1] for name, pair in made.items()})
    floats.norm, packed.norm = vector(HIDDEN)
    floats.head, packed.head = matrix(VOCAB, HIDDEN)
    return packed, floats


def forward_with(w, window=0):
    def forward(ops, batch):
        x = ops.embedding(batch.ids, w.embed)
        angles = ops.rope_angles(batch.positions, w.inv_freq)
        for i, layer in enumerate(w.layers):
            q, k, v = ops.split(ops.linear(ops.rms_norm(x, layer["norm1"], 1e-5), layer["qkv"]), [Q, KV, KV])
            q, k = ops.rope(q, angles, HEAD_DIM), ops.rope(k, angles, HEAD_DIM)
            ops.write_kv(k, v, batch, i)
            x = ops.add(x, ops.linear(ops.paged_attention(q, batch, i, HEAD_DIM, HEAD_DIM**-0.5, window), layer["o"]))
            h = ops.activate_and_mul(
                ops.linear(ops.rms_norm(x, layer["norm2"], 1e-5), layer["gate_up"]), Activation.SILU
            )
            x = ops.add(x, ops.linear(h, layer["down"]))
        return ops.logits(ops.rms_norm(x, w.norm, 1e-5), w.head, batch)

    return forward


class NumpyOps:
    """The op set on one whole sequence, in numpy."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.pages = {}

    def embedding(self, ids, table):
        return table[ids].astype(self.dtype)

    def rms_norm(self, x, weight, eps):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.dtype(eps)) * weight.astype(self.dtype)

    def linear(self, x, w):
        return x @ w[0].T.astype(self.dtype) + w[1].astype(self.dtype)

    def split(self, x, sizes):
        return np.split(x, np.cumsum(sizes)[:-1], axis=1)

    def rope_angles(self, positions, inv_freq):
        angles = positions[:, None].astype(np.float32) * inv_freq
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(self.dtype)

    def rope(self, x, angles, head_dim):
        cos, sin = (a[:, None] for a in np.split(angles, 2, axis=1))
        low, high = np.split(x.reshape(len(x), -1, head_dim), 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2).reshape(x.shape)

    def write_kv(self, k, v, batch, layer):
        self.pages[layer] = k, v

    def paged_attention(self, q, batch, layer, head_dim, scale, window=0):
        q, k, v = (x.reshape(len(x), -1, head_dim).transpose(1, 0, 2) for x in (q, *self.pages[layer]))
        k, v = (np.repeat(x, len(q) // len(k), axis=0) for x in (k, v))
        scores = q @ k.transpose(0, 2, 1) * self.dtype(scale)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)

    def activate_and_mul(self, x, kind):
        gate, up = np.split(x, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up

    def add(self, x, y):
        return x + y

    def logits(self, x, head, batch):
        return self.linear(x[batch.logit_rows], head)


IDS = {seq: np.random.default_rng(seq).integers(0, VOCAB, 40).tolist() for seq in range(3)}
STEPS = [[(0, 20)], [(0, 1), (1, 17), (2, 3)], [(1, 1), (0, 2), (2, 4)], [(2, 1), (1, 1), (0, 1)]]


def run(program, steps, spec=SPEC):
    """Logits of every token of every sequence."""
    pool, outs = Pool(spec, 32), {}
    for runs in steps:
        batch = pool.batch([(s, IDS[s][(at := pool.computed.get(s, 0)) : at + n]) for s, n in runs])
        logits = program.run(batch)
        for i, (seq, _) in enumerate(runs):
            outs.setdefault(seq, []).append(logits[batch.seq_starts[i] : batch.seq_starts[i + 1]].copy())
    return {seq: np.concatenate(parts) for seq, parts in outs.items()}


def compiled(threads=2, max_tokens=64, **kwargs):
    ops = NativeOps(threads)
    packed, floats = tiny_llama(ops, **kwargs)
    return ops.compile(forward_with(packed), ops.new_cache(SPEC, 32), ProgramSpec(max_tokens)), floats


@pytest.mark.parametrize("name", available_isas())
def test_a_tape_equals_the_recorded_function(name):
    use_isa(name)
    try:
        program, floats = compiled()
        outs = run(program, STEPS)
    finally:
        use_isa(available_isas()[0])
    for seq, out in outs.items():
        batch = Pool(SPEC, 32).batch([(seq, IDS[seq][: len(out)])])
        plain, truth = (forward_with(floats)(NumpyOps(dtype), batch) for dtype in (np.float32, np.float64))
        assert max_error(out, truth) <= 4 * max_error(plain, truth) + 1e-5


def test_quantized_weights_stay_close_to_their_values():
    """The error is that of quantizing activations to 8 bits, about 1 % of the logits."""
    program, floats = compiled(quantized=True)
    for seq, out in run(program, STEPS).items():
        batch = Pool(SPEC, 32).batch([(seq, IDS[seq][: len(out)])])
        truth = forward_with(floats)(NumpyOps(np.float64), batch)
        assert np.sqrt(((out - truth) ** 2).mean()) < 0.03 * truth.std()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", available_isas())
def test_batch_chunks_and_threads_change_no_bit_of_a_token(name, quantized):
    use_isa(name)
    try:
        mixed = run(compiled(threads=2, quantized=quantized)[0], STEPS)
        single, many = compiled(threads=1, quantized=quantized)[0], compiled(threads=5, quantized=quantized)[0]
        for seq, out in mixed.items():
            assert np.array_equal(out, run(single, [[(seq, 1)]] * len(out))[seq])
            assert np.array_equal(out, run(many, [[(seq, len(out))]])[seq])
    finally:
        use_isa(available_isas()[0])


def test_only_requested_rows_get_logits_in_their_order():
    program, _ = compiled()
    batch = Pool(SPEC, 32).batch([(0, IDS[0][:20]), (1, IDS[1][:9])])
    everything = program.run(batch).copy()
    batch.logit_rows = int32([28, 3, 3, 19])
    assert np.array_equal(program.run(batch), everything[[28, 3, 3, 19]])
    batch.logit_rows = int32([])
    assert program.run(batch).shape == (0, VOCAB)


def test_an_empty_step_is_no_error():
    program, _ = compiled()
    batch = Pool(SPEC, 32).batch([(0, [])])
    assert program.run(batch).shape == (0, VOCAB)


def test_values_share_memory():
    """The values of a layer are many times as wide as those live at once."""
    program, _ = compiled(max_tokens=64)
    widest = HIDDEN + 2 * INNER + INNER + 32  # residual, gate and up, gated, angles
    assert program.arena_bytes <= 4 * 64 * (widest + Q + 2 * KV)


def test_a_value_is_live_until_the_last_read_of_any_of_its_columns():
    """Columns of a split value are read long after the others; meanwhile other values are allocated and freed."""
    ops = NativeOps(3)
    rng = np.random.default_rng(3)
    x = rng.integers(-8, 8, (9, 24)).astype(np.float32)
    swap = np.eye(8)[::-1]
    table, flip, eye = ops.table(stored(x)), ops.pack([stored(swap)]), ops.pack([stored(np.eye(8))])

    def forward(ops, batch):
        a, b, c = ops.split(ops.embedding(batch.ids, table), [8, 8, 8])
        y = ops.linear(a, flip)
        for _ in range(4):
            y = ops.add(ops.linear(y, flip), b)
        y = ops.add(y, ops.linear(ops.linear(y, flip), flip))
        return ops.logits(ops.add(c, y), eye, batch)

    program = ops.compile(forward, ops.new_cache(SPEC, 4), ProgramSpec(16))
    a, b, c = np.split(x, 3, axis=1)
    y = a[:, ::-1]
    for _ in range(4):
        y = y[:, ::-1] + b
    out = program.run(Pool(SPEC, 4).batch([(0, range(9))]))
    assert np.array_equal(out, c + 2 * y)


def broken(field, index, value):
    def change(batch):
        getattr(batch, field)[index] = value

    return change


def shortened(field):
    return lambda batch: setattr(batch, field, getattr(batch, field)[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken("ids", 2, VOCAB), rf"ids\[2\] is {VOCAB}"),
        (broken("ids", 0, -1), r"ids\[0\] is -1"),
        (broken("positions", 1, -5), r"positions\[1\]"),
        (broken("slots", 3, 32 * 16), r"slots\[3\]"),
        (broken("logit_rows", 0, 29), r"logit_rows\[0\]"),
        (broken("block_tables", (1, 0), 32), r"block_tables\[0\] is 32"),
        (broken("context_lens", 0, 19), "20 tokens in a context of 19"),
        (broken("context_lens", 0, 500), "a block table for"),
        (broken("seq_starts", 0, 1), "seq_starts runs from 1"),
        (broken("seq_starts", 1, 40), "40 tokens in a context of 20"),
        (broken("seq_starts", 1, -3), "-3 tokens"),
        (shortened("positions"), "positions has 28 entries"),
        (shortened("seq_starts"), "seq_starts has 2 entries"),
        (lambda batch: setattr(batch, "ids", batch.ids.astype(np.int64)), "incompatible"),
    ],
)
def test_a_batch_that_points_outside_is_refused(change, message):
    program, _ = compiled()
    batch = Pool(SPEC, 32).batch([(0, IDS[0][:20]), (1, IDS[1][:9])])
    change(batch)
    with pytest.raises((ValueError, TypeError), match=message):
        program.run(batch)


def test_more_tokens_than_compiled_for_are_refused():
    program, _ = compiled(max_tokens=16)
    with pytest.raises(ValueError, match="17 tokens, and the program was compiled for 16"):
        program.run(Pool(SPEC, 32).batch([(0, IDS[0][:17])]))


def test_copied_and_swapped_blocks_carry_on_the_sequence():
    ops = NativeOps()
    packed, _ = tiny_llama(ops)
    cache = ops.new_cache(SPEC, 32, num_host_blocks=4)
    program, pool = ops.compile(forward_with(packed), cache, ProgramSpec(64)), Pool(SPEC, 32)
    program.run(pool.batch([(0, IDS[0][:20])]))
    table = pool.tables[0]
    expected = program.run(pool.batch([(0, IDS[0][20:23])])).copy()

    moved = [pool.free.pop() for _ in table]
    cache.swap_out(list(zip(table, range(2), strict=True)))
    cache.pages[: 32 * SPEC.block_bytes].fill(0xFF)
    cache.swap_in(list(zip(range(2), moved, strict=True)))
    copies = [pool.free.pop() for _ in table]
    cache.copy(list(zip(moved, copies, strict=True)))
    for blocks in (moved, copies):
        pool.tables[0], pool.computed[0] = blocks, 20
        assert np.array_equal(program.run(pool.batch([(0, IDS[0][20:23])])), expected)


@pytest.mark.parametrize(
    ("method", "pair"), [("copy", (0, 32)), ("copy", (-1, 0)), ("swap_out", (0, 2)), ("swap_in", (2, 0))]
)
def test_blocks_out_of_range_are_not_copied(method, pair):
    cache = NativeOps().new_cache(SPEC, 32, num_host_blocks=2)
    with pytest.raises(ValueError, match="copy of block"):
        getattr(cache, method)([pair])

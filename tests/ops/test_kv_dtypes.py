"""KV cache types: both backends store the same values, attention stays near, and a NaN is seen."""

import numpy as np
import pytest
import torch

from ops.native_harness import Pool, stored
from ops.test_native_attention import Case
from quire.core.errors import Unsupported
from quire.ops.kv_spec import KV_DTYPES, KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import ProgramSpec
from quire.ops.reference import TorchOps


@pytest.fixture
def restore_isa():
    yield
    use_isa(available_isas()[0])


def native_int8(cache):
    """The layout of native/src/ops.h, undone: values [layers, K and V, blocks, slots, heads, head_dim], and scales."""
    spec, columns = cache.spec, -(-cache.spec.head_dim // 16) * 16
    heads = cache.pages[: cache.num_blocks * spec.block_bytes].reshape(
        cache.num_blocks, spec.num_layers, 2, spec.num_kv_heads, -1
    )
    q = heads[..., : columns * spec.block_size].view(np.int8)
    scales = heads[..., columns * spec.block_size :].copy().view(np.float32).transpose(1, 2, 0, 4, 3)
    keys = q[:, :, 0].reshape(*q.shape[:2], spec.num_kv_heads, columns // 4, spec.block_size, 4)
    values = q[:, :, 1].reshape(*q.shape[:2], spec.num_kv_heads, spec.block_size // 4, columns, 4)
    keys = keys.transpose(1, 0, 4, 2, 3, 5).reshape(spec.num_layers, cache.num_blocks, spec.block_size, -1, columns)
    values = values.transpose(1, 0, 3, 5, 2, 4).reshape(spec.num_layers, cache.num_blocks, spec.block_size, -1, columns)
    return np.stack([keys, values], axis=1), scales


def run(ops, case, cache):
    rows = torch.tensor(case.rows) if isinstance(ops, TorchOps) else ops.table(stored(case.rows))

    def forward(ops, batch):
        x = rows[batch.ids] if isinstance(rows, torch.Tensor) else ops.embedding(batch.ids, rows)
        q, k, v = ops.split(x, case.columns)
        ops.write_kv(k, v, batch, 1)
        out = ops.paged_attention(q, batch, 1, case.head_dim, case.scale)
        return ops.rows(out, batch)

    program, pool = ops.compile(forward, cache, ProgramSpec(len(case.rows))), Pool(case.spec, case.num_blocks)
    out = program.run(pool.batch([(s, case.ids(s, 0, case.length)) for s in range(2)]))
    return out.numpy() if isinstance(out, torch.Tensor) else out.copy()


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("head_dim", [64, 20])
def test_both_backends_store_the_same_codes(name, head_dim, restore_isa):
    use_isa(name)
    case = Case(4, 2, head_dim, 16, "int8", seqs=2)
    case.rows[3] = 0.0  # a token of zeros, and numbers of all sizes
    case.rows[4] *= 1e-32
    case.rows[5:] *= 10.0 ** np.random.default_rng(1).integers(-9, 9, (len(case.rows) - 5, 1))
    native, plain = NativeOps(), TorchOps()
    cache, twin = native.new_cache(case.spec, case.num_blocks), plain.new_cache(case.spec, case.num_blocks)
    cache.pages.fill(0)
    run(native, case, cache)
    run(plain, case, twin)
    q, scales = native_int8(cache)
    for i in range(2):
        np.testing.assert_array_equal(q[:, i, ..., :head_dim], twin.pages[i].numpy())
        np.testing.assert_array_equal(scales[:, i], twin.pages[2 + i].numpy())
    assert not q[..., head_dim:].any()
    assert abs(q).max() == 127


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize(
    ("dtype", "bound", "apart"),
    [("float32", 2e-6, 2e-6), ("float16", 2.5e-3, 2.5e-3), ("bfloat16", 5e-3, 1e-5), ("int8", 2e-2, 2e-4)],
)
def test_how_near_attention_stays_to_that_of_unrounded_keys_and_values(name, dtype, bound, apart, restore_isa):
    """Relative, root of mean squares: from fp64 attention, and from the plain backend."""
    use_isa(name)
    case = Case(9, 3, 64, 16, dtype, seqs=2, length=150)
    ops, plain = NativeOps(), TorchOps()
    out = run(ops, case, ops.new_cache(case.spec, case.num_blocks))
    twin = run(plain, case, plain.new_cache(case.spec, case.num_blocks))
    case.spec = KVSpec(2, 3, 64, 16, "float64")  # rounds nothing
    truth = np.concatenate([case.plain(seq, 150, np.float64) for seq in range(2)])

    def error(x, y):
        return np.sqrt(np.mean((x - y) ** 2) / np.mean(truth**2))

    assert error(out, truth) < bound
    assert error(out, twin) < apart


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_shows_in_int8_and_only_where_it_is_seen(name, part, bad, restore_isa):
    use_isa(name)
    case = Case(6, 2, 24, 16, "int8", seqs=2, length=80)
    case.rows[50, sum(case.columns[:part]) + 3] = bad
    for steps in ([[(0, 80), (1, 80)]], [[(0, 30), (1, 80)], *([[(0, 1)]] * 50)]):
        outs = case.run(steps)
        assert np.isnan(outs[0][50:]).any(axis=1).all()
        assert np.isfinite(outs[0][:50]).all() and np.isfinite(outs[1]).all()


@pytest.mark.parametrize("name", available_isas())
def test_a_query_that_is_no_number_shows_in_int8(name, restore_isa):
    use_isa(name)
    case = Case(6, 2, 24, 16, "int8", seqs=1, length=40)
    case.rows[30, 24 + 5] = np.nan
    out = case.run([[(0, 40)]])[0]
    assert np.isnan(out[30]).any() and np.isfinite(np.delete(out, 30, axis=0)).all()


def test_a_block_of_int8_counts_its_units():
    assert KVSpec(30, 3, 64, 16, "int8").block_bytes == 2 * 30 * 3 * 16 * (64 + 4)
    assert KVSpec(1, 1, 20, 16, "int8").block_bytes == 2 * 16 * (32 + 4)  # columns in sixteens
    for dtype in KV_DTYPES:
        cache = NativeOps().new_cache(KVSpec(2, 2, 24, 16, dtype), 3)
        assert len(cache.pages) == 3 * cache.spec.block_bytes + 64


def test_types_that_are_not_there_are_refused():
    with pytest.raises(Unsupported, match="a KV cache of fp8"):
        NativeOps().new_cache(KVSpec(1, 1, 8, 8, "fp8"), 1)
    ops = NativeOps()
    with pytest.raises(ValueError, match="int8"):
        ops.compile(_nothing(ops), ops.new_cache(KVSpec(1, 1, 8, 12, "int8"), 1), ProgramSpec(1))


def _nothing(ops):
    table, eye = ops.table(stored(np.eye(8))), ops.pack([stored(np.eye(8))])
    return lambda o, b: o.logits(o.embedding(b.ids, table), eye, b)

"""Attention over latent pages (MLA) and per-head matmuls against fp64, in every ISA. Batching changes nothing."""

import numpy as np
import pytest

from ops.native_harness import Pool, apply, assert_close, stored
from ops.test_native_attention import STEPS, Case, as_stored, assert_right
from quire.core.errors import Unsupported
from quire.models.config import ModelConfig
from quire.ops.kv_spec import KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import ProgramSpec
from quire.ops.tensors import BF16, F16, StoredTensor
from quire.runtime.kv import kv_spec

DTYPES = ["float16", "bfloat16", "float32"]


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    use_isa(available_isas()[0])


class LatentCase(Case):
    """Token t of sequence s has the embedding (q nope, q rope, latent, k rope)."""

    def __init__(self, heads, latent, rope, block_size, dtype="float16", *, seqs=3, length=80):
        rng = np.random.default_rng(heads + latent)
        self.heads, self.latent, self.rope, self.length = heads, latent, rope, length
        self.spec = KVSpec(2, 1, latent + rope, block_size, dtype, latent)
        self.scale = (latent + rope) ** -0.5
        self.columns = [heads * latent, heads * rope, latent, rope]
        self.rows = (rng.standard_normal((seqs * length, sum(self.columns))) * 2).astype(np.float32)
        self.num_blocks = seqs * (length // block_size + 1)

    def program(self, threads=2):
        ops = NativeOps(threads)
        table = ops.table(stored(self.rows))

        def forward(ops, batch):
            q_latent, q_rope, latent, rope = ops.split(ops.embedding(batch.ids, table), self.columns)
            ops.write_latent(latent, rope, batch, 1)
            return ops.rows(ops.mla_attention(q_latent, q_rope, batch, 1, self.scale), batch)

        cache = ops.new_cache(self.spec, self.num_blocks)
        cache.pages.fill(0xFF)  # unwritten memory is NaN
        return ops.compile(forward, cache, ProgramSpec(len(self.rows)))

    def plain(self, seq, num_tokens, dtype):
        rows = self.rows[seq * self.length :][:num_tokens]
        parts = np.split(rows, np.cumsum(self.columns)[:3], axis=1)
        q = np.concatenate([x.reshape(num_tokens, self.heads, -1) for x in parts[:2]], axis=-1).astype(dtype)
        kept = as_stored(np.concatenate(parts[2:], axis=1), self.spec).astype(dtype)
        scores = q.transpose(1, 0, 2) @ kept.T * dtype(self.scale)
        scores = np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        output = p / p.sum(axis=-1, keepdims=True) @ kept[:, : self.latent]
        return output.transpose(1, 0, 2).reshape(num_tokens, -1)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "block_size"),
    [(16, 64, 8, 16), (5, 20, 6, 16), (40, 16, 4, 4), (3, 24, 8, 11), (1, 8, 2, 128)],
)
def test_mla_attention(name, dtype, heads, latent, rope, block_size):
    use_isa(name)
    case = LatentCase(heads, latent, rope, block_size, dtype)
    for seq, out in case.run(STEPS).items():
        assert_right(name, case, out, seq)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [4, 16, 40])
def test_batch_chunks_and_threads_change_no_bit(name, dtype, heads):
    use_isa(name)
    case = LatentCase(heads, 32, 8, 16, dtype)
    for seq, out in case.run(STEPS).items():
        assert np.array_equal(out, case.run([[(seq, 1)]] * len(out), threads=1)[seq])
        assert np.array_equal(out, case.run([[(seq, len(out))]], threads=3)[seq])


@pytest.mark.parametrize("name", available_isas())
def test_a_long_context_is_the_same_whole_and_in_splits(name):
    """The context of a single token is divided into splits of 256 positions."""
    use_isa(name)
    case = LatentCase(6, 24, 8, 16, seqs=1, length=600)
    whole = case.run([[(0, 600)]])[0]
    assert_right(name, case, whole)
    for threads in (1, 3):
        steps = [[(0, 250)], *([[(0, 1)]] * 8), [(0, 260)], *([[(0, 1)]] * 8), [(0, 74)]]
        np.testing.assert_array_equal(case.run(steps, threads)[0], whole)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("heads", [8, 20])
def test_shared_prefix_groups_equal_each_sequence_alone(name, heads):
    """Five sequences share the prefix of one: four in a tile of queries, or (20 heads) each in its own."""
    use_isa(name)
    case = LatentCase(heads, 16, 8, 16, seqs=6, length=320)
    case.num_blocks = 600
    apart, together, lone, pool = case.program(3), case.program(2), Pool(case.spec, 600), Pool(case.spec, 600)
    together.run(pool.batch([(0, case.ids(0, 0, 288))]))
    apart.run(lone.batch([(0, case.ids(0, 0, 288))]))
    for seq in range(1, 6):
        pool.tables[seq], pool.computed[seq] = pool.tables[0][:17], 272
        apart.run(lone.batch([(seq, case.ids(0, 0, 272))]))
    runs = [(seq, case.ids(seq, 300, 301)) for seq in range(6)]
    output = together.run(pool.batch(runs)).copy()
    for i, run in enumerate(runs):
        np.testing.assert_array_equal(output[i : i + 1], apart.run(lone.batch([run])))


def halves(array):
    return StoredTensor("", array.shape, F16, array.astype(np.float16).view(np.uint8))


def upper_halves(array):
    bits = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
    return StoredTensor("", array.shape, BF16, bits.view(np.uint8))


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("as_kept", [stored, halves, upper_halves])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(4, 16, 48), (3, 20, 7), (1, 128, 32)])
def test_linear_heads(name, as_kept, heads, inputs, outputs):
    use_isa(name)
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((37, heads * inputs)).astype(np.float32)
    w = rng.integers(-127, 128, (heads, outputs, inputs)).astype(np.float32) / 128  # the same in all types
    packed = NativeOps().pack_heads([as_kept(head) for head in w])
    out = apply(lambda ops, value, _: ops.linear_heads(value, packed), x)

    def plain(dtype):
        parts = x.astype(dtype).reshape(len(x), heads, inputs)
        return np.einsum("thi,hoi->tho", parts, w.astype(dtype)).reshape(len(x), -1)

    if name in ("dotprod", "i8mm") and as_kept is halves:
        assert np.abs(out - plain(np.float64)).max() < 2**-8 * np.abs(out).max()
    else:
        assert_close(out, plain(np.float32), plain(np.float64))
    for row in (0, 36):
        np.testing.assert_array_equal(
            apply(lambda ops, value, _: ops.linear_heads(value, packed), x[row : row + 1]), out[row : row + 1]
        )


def test_a_latent_cache_keeps_one_vector_a_token():
    size = {"hidden": 64, "layers": 3, "heads": 16, "kv_heads": 1, "vocab": 10, "max_position": 100, "max_length": 100}
    config = ModelConfig(architecture="", head_dim=576, latent=512, windows=(0,) * 3, **size)
    assert kv_spec(config, 16, "bfloat16") == KVSpec(3, 1, 576, 16, "bfloat16", latent=512)
    assert kv_spec(config, 16, "bfloat16").block_bytes == 3 * 16 * 576 * 2
    assert kv_spec(config, 16, "fp8").block_bytes == 3 * 16 * 576
    with pytest.raises(Unsupported, match="an int8 KV cache of latent vectors"):
        kv_spec(config, 16, "int8")

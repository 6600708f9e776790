"""Sparse attention against a plain twin, with ties between scores: in plain torch, and by the kernels in every ISA."""

import numpy as np
import pytest

from ops.native_harness import Pool, stored
from ops.test_native_attention import STEPS, as_stored, assert_right
from ops.test_native_latent import DTYPES, LatentCase
from quire.ops.kv_spec import IndexSpec, KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import ProgramSpec
from quire.ops.reference import TorchOps


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    use_isa(available_isas()[0])


class TorchRun:
    def __init__(self, program):
        self._program = program

    def run(self, batch):
        return self._program.run(batch).numpy()


class SparseCase(LatentCase):
    """Queries, weights and keys of the indexer are small integers: scores are exact, and many are equal."""

    def __init__(self, heads, top_k, index_heads=3, index_dim=9, block_size=16, dtype="float16", backend=NativeOps):
        super().__init__(heads, 24, 8, block_size, dtype)
        self.index_heads, self.index_dim, self.top_k, self.backend = index_heads, index_dim, top_k, backend
        self.columns += [index_heads * index_dim, index_heads, index_dim]
        indexed = np.random.default_rng(top_k).integers(-2, 3, (len(self.rows), sum(self.columns[4:])))
        self.rows = np.concatenate([self.rows, indexed.astype(np.float32)], axis=1)
        self.spec = KVSpec(2, 1, 32, block_size, dtype, 24, index=IndexSpec(index_dim, top_k))

    def program(self, threads=2):
        ops = self.backend(threads=threads)
        table = ops.table(stored(self.rows))

        def forward(ops, batch):
            parts = ops.split(ops.embedding(batch.ids, table), self.columns)
            q_latent, q_rope, latent, rope, index_q, weights, key = parts
            ops.write_latent(latent, rope, batch, 1)
            ops.write_index_key(key, batch, 1)
            chosen = ops.top_positions(index_q, weights, batch, 1)
            return ops.rows(ops.mla_attention(q_latent, q_rope, batch, 1, self.scale, chosen), batch)

        self.cache = ops.new_cache(self.spec, self.num_blocks, 3)
        if self.backend is NativeOps:  # unwritten memory is NaN
            self.cache.pages.fill(0xFF)
            self.cache.index_keys.fill(0xFF)
        program = ops.compile(forward, self.cache, ProgramSpec(len(self.rows)))
        return program if self.backend is NativeOps else TorchRun(program)

    def chosen(self, seq, num_tokens):
        """[tokens, tokens]: whether a token sees a position."""
        rows = self.rows[seq * self.length :][:num_tokens, -sum(self.columns[4:]) :]
        q, weights, keys = np.split(rows, np.cumsum(self.columns[4:])[:2], axis=1)
        dots = np.maximum(np.einsum("thd,sd->ths", q.reshape(num_tokens, self.index_heads, -1), keys), 0)
        scores = np.einsum("th,ths->ts", weights, dots)
        seen = np.zeros((num_tokens, num_tokens), bool)
        for token in range(num_tokens):
            best = np.argsort(-scores[token, : token + 1], kind="stable")[: self.top_k]  # the lower of equals
            seen[token, best] = True
        return seen

    def plain(self, seq, num_tokens, dtype):
        rows = self.rows[seq * self.length :][:num_tokens]
        parts = np.split(rows, np.cumsum(self.columns)[:4], axis=1)
        q = np.concatenate([x.reshape(num_tokens, self.heads, -1) for x in parts[:2]], axis=-1).astype(dtype)
        kept = as_stored(np.concatenate(parts[2:4], axis=1), self.spec).astype(dtype)
        scores = q.transpose(1, 0, 2) @ kept.T * dtype(self.scale)
        scores = np.where(self.chosen(seq, num_tokens), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        output = p / p.sum(axis=-1, keepdims=True) @ kept[:, : self.latent]
        return output.transpose(1, 0, 2).reshape(num_tokens, -1)


CASES = [(4, 7, 3, 9, 16), (40, 20, 2, 16, 4), (1, 1, 1, 8, 128), (5, 33, 4, 33, 11)]


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_attend_to_what_the_indexer_chooses(name, dtype, case):
    use_isa(name)
    case = SparseCase(*case, dtype)
    for seq, out in case.run(STEPS).items():
        assert_right(name, case, out, seq)


@pytest.mark.parametrize("case", CASES)
def test_plain_torch_attends_to_what_the_indexer_chooses(case):
    case = SparseCase(*case, "float32", backend=TorchOps)
    for seq, out in case.run(STEPS).items():
        truth = case.plain(seq, len(out), np.float64)
        np.testing.assert_allclose(out, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("heads", [4, 40])
def test_batch_chunks_and_threads_change_no_bit(name, heads):
    use_isa(name)
    case = SparseCase(heads, 13)
    for seq, out in case.run(STEPS).items():
        assert np.array_equal(out, case.run([[(seq, 1)]] * len(out), threads=1)[seq])
        assert np.array_equal(out, case.run([[(seq, 1)]] * len(out), threads=3)[seq])
        assert np.array_equal(out, case.run([[(seq, len(out))]], threads=3)[seq])


def test_a_choice_of_all_positions_has_the_bits_of_dense_attention():
    sparse, dense = SparseCase(6, 80), LatentCase(6, 24, 8, 16)
    dense.rows = sparse.rows[:, : sum(sparse.columns[:4])].copy()
    for seq, out in sparse.run(STEPS).items():
        np.testing.assert_array_equal(out, dense.run(STEPS)[seq])


@pytest.mark.parametrize("backend", [NativeOps, TorchOps])
def test_keys_of_the_indexer_go_where_their_blocks_go(backend):
    """A sequence goes on behind blocks that were swapped out and in, copied, and moved slot by slot."""
    case = SparseCase(4, 7, block_size=8, dtype="float32", backend=backend)
    expected = case.run([[(0, 40)]])[0][32:]
    program, cache, pool = case.program(), case.cache, Pool(case.spec, case.num_blocks)
    program.run(pool.batch([(0, case.ids(0, 0, 32))]))
    table, others = pool.tables[0], pool.free[:4]
    cache.swap_out([(table[0], 2), (table[1], 0)])
    cache.swap_in([(2, others[0]), (0, others[1])])
    cache.copy([(table[2], others[2])])
    cache.move([(table[3] * 8 + slot, others[3] * 8 + slot) for slot in range(8)])
    pool.tables[0], pool.free = [*others], pool.free[4:]
    program.run(pool.batch([(1, case.ids(1, 0, 8)), (2, case.ids(2, 0, 8))]))  # in other blocks
    np.testing.assert_allclose(program.run(pool.batch([(0, case.ids(0, 32, 40))])), expected, rtol=1e-5, atol=1e-6)

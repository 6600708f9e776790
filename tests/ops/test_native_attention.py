"""Paged attention against a plain softmax, in every ISA. The rest of the batch must not change a token's result."""

import numpy as np
import pytest

from ops.native_harness import Pool, assert_close, max_error, stored
from quire.ops.kv_spec import KV_DTYPES, KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.opset import ProgramSpec

pytestmark = pytest.mark.slow


@pytest.fixture
def restore_isa():
    yield
    use_isa(available_isas()[0])


class Case:
    """Sequences of random q, k and v. Token t of sequence s has the id s * length + t, its embedding is (q, k, v)."""

    def __init__(
        self,
        heads,
        kv_heads,
        head_dim,
        block_size,
        dtype="float16",
        *,
        window=0,
        softcap=0.0,
        slopes=None,
        sinks=None,
        biases=None,
        seqs=3,
        length=80,
    ):
        rng = np.random.default_rng(0)
        self.softcap = softcap
        given = (None if x is None else np.asarray(x, np.float32) for x in (slopes, sinks, biases))
        self.slopes, self.sinks, self.biases = given
        self.heads, self.kv_heads, self.head_dim, self.window, self.length = heads, kv_heads, head_dim, window, length
        self.spec = KVSpec(2, kv_heads, head_dim, block_size, dtype)
        self.scale = head_dim**-0.5
        self.columns = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.rows = (rng.standard_normal((seqs * length, sum(self.columns))) * 2).astype(np.float32)
        self.num_blocks = seqs * (length // block_size + 1)

    def program(self, threads=2):
        ops = NativeOps(threads)
        table = ops.table(stored(self.rows))

        def forward(ops, batch):
            q, k, v = ops.split(ops.embedding(batch.ids, table), self.columns)
            ops.write_kv(k, v, batch, 1)
            adjusted = self.softcap, self.slopes, self.sinks, self.biases
            out = ops.paged_attention(q, batch, 1, self.head_dim, self.scale, self.window, *adjusted)
            return ops.rows(out, batch)

        cache = ops.new_cache(self.spec, self.num_blocks)
        cache.pages.fill(0xFF)  # unwritten memory is NaN
        return ops.compile(forward, cache, ProgramSpec(len(self.rows)))

    def ids(self, seq, start, end):
        return range(seq * self.length + start, seq * self.length + end)

    def run(self, steps, threads=2):
        """steps: lists of (sequence, tokens). -> the outputs of each sequence, all its tokens."""
        program, pool = self.program(threads), Pool(self.spec, self.num_blocks)
        outs = {}
        for runs in steps:
            starts = [pool.computed.get(seq, 0) for seq, _ in runs]
            batch = pool.batch([(s, self.ids(s, at, at + n)) for (s, n), at in zip(runs, starts, strict=True)])
            out = program.run(batch)
            for i, (seq, _) in enumerate(runs):
                outs.setdefault(seq, []).append(out[batch.seq_starts[i] : batch.seq_starts[i + 1]].copy())
        return {seq: np.concatenate(parts) for seq, parts in outs.items()}

    def plain(self, seq, num_tokens, dtype):
        """Softmax over all visible positions, with one matrix of scores per head."""
        first, group = seq * self.length, self.heads // self.kv_heads
        q, k, v = np.split(self.rows[first : first + num_tokens], np.cumsum(self.columns)[:2], axis=1)
        k, v = (as_stored(x, self.spec).astype(dtype) for x in (k, v))
        q, k, v = (x.astype(dtype).reshape(num_tokens, -1, self.head_dim).transpose(1, 0, 2) for x in (q, k, v))
        k, v = (np.repeat(x, group, axis=0) for x in (k, v))
        scores = q @ k.transpose(0, 2, 1) * dtype(self.scale)
        distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
        if self.softcap:
            scores = dtype(self.softcap) * np.tanh(scores / dtype(self.softcap))
        if self.slopes is not None:
            scores = scores - self.slopes.astype(dtype)[:, None, None] * distance.astype(dtype)
        if self.biases is not None:
            reach = self.biases.shape[1] // 2
            scores = scores + self.biases.astype(dtype)[:, reach + np.clip(-distance, -reach, reach)]
        seen = (distance >= 0) & (distance < (self.window or num_tokens))
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - most)
        sunk = 0 if self.sinks is None else np.exp(self.sinks.astype(dtype)[:, None, None] - most)
        return (p / (p.sum(axis=-1, keepdims=True) + sunk) @ v).transpose(1, 0, 2).reshape(num_tokens, -1)


def as_stored(x, spec):
    """k or v [tokens, kv_heads * head_dim], rounded to the type of the cache."""
    if spec.dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if spec.dtype == "int8":
        heads = x.reshape(-1, spec.head_dim)
        most = np.abs(heads).max(axis=1, keepdims=True)
        codes = np.round(heads * (np.float32(127) / most))
        return (codes * (most / np.float32(127))).reshape(x.shape)
    return x.astype(spec.dtype)


def assert_right(name, case, out, seq=0):
    """As near to attention over the stored values as fp32. With fp16 arithmetic, a few ulps of fp16; with queries and
    weights quantized to 15 bits, a few steps of these."""
    truth = case.plain(seq, len(out), np.float64)
    if case.spec.dtype == "int8":
        error = out - truth
        assert np.abs(error).max() < 2**-11 * np.abs(case.rows).max()
        assert np.sqrt(np.mean(error**2)) < 2**-12 * np.sqrt(np.mean(truth**2))
    elif name in HALF_MATH and case.spec.dtype == "float16":
        error = out - truth
        assert np.abs(error).max() < 2**-8 * np.abs(case.rows).max()
        assert np.sqrt(np.mean(error**2)) < 2**-8 * np.sqrt(np.mean(truth**2))
    else:
        assert_close(out, case.plain(seq, len(out), np.float32), truth)


HALF_MATH = {"dotprod", "i8mm"}
STEPS = [
    [(0, 33), (1, 1)],
    [(0, 7), (1, 2), (2, 40)],
    [(1, 1), (2, 33)],
    [(0, 1), (1, 1), (2, 1)],
]  # 41, 5 and 74 tokens


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("window", [0, 1, 19])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (9, 3, 64, 16, "float16"),
        (14, 2, 64, 32, "float32"),
        (4, 1, 256, 8, "float16"),
        (8, 8, 80, 16, "float16"),
        (12, 1, 32, 32, "float16"),
        (2, 1, 128, 16, "float16"),
        (6, 3, 20, 5, "float16"),  # neither heads nor blocks fill a vector
        (9, 3, 64, 16, "bfloat16"),
        (6, 3, 20, 5, "bfloat16"),
        (9, 3, 64, 16, "int8"),
        (14, 2, 64, 32, "int8"),
        (4, 1, 256, 32, "int8"),
        (8, 8, 80, 16, "int8"),
        (6, 3, 21, 48, "int8"),  # heads do not fill a vector
    ],
)
def test_attention_equals_softmax(name, window, heads, kv_heads, head_dim, block_size, dtype, restore_isa):
    use_isa(name)
    case = Case(heads, kv_heads, head_dim, block_size, dtype, window=window)
    for seq, out in case.run(STEPS).items():
        assert_right(name, case, out, seq)


SLOPES = 2.0 ** -np.arange(1, 10)  # of nine heads
SINKS = np.arange(9) - 2.0
BIASES = np.random.default_rng(5).normal(size=(9, 2 * 21 + 1))  # of up to 21 tokens before; all beyond are one
BENT = [{"softcap": 5.0}, {"slopes": SLOPES}, {"softcap": 5.0, "slopes": SLOPES}, {"sinks": SINKS}, {"biases": BIASES}]


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("window", [0, 19])
@pytest.mark.parametrize("adjusted", BENT, ids=["softcap", "slopes", "both", "sinks", "biases"])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(64, 16, "float16"), (20, 5, "float16"), (64, 32, "float32"), (20, 5, "bfloat16"), (21, 48, "int8")],
)
def test_softcap_slopes_biases_and_sinks(name, window, adjusted, head_dim, block_size, dtype, restore_isa):
    use_isa(name)
    case = Case(9, 3, head_dim, block_size, dtype, window=window, **adjusted)
    straight = Case(9, 3, head_dim, block_size, dtype, window=window)
    for seq, out in case.run(STEPS).items():
        assert_right(name, case, out, seq)
        assert max_error(out, straight.plain(seq, len(out), np.float64)) > 0.1


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(9, 3, 0), (14, 2, 0), (4, 1, 10), (9, 3, 1)])
def test_batch_chunks_and_threads_change_no_bit(name, dtype, heads, kv_heads, window, restore_isa):
    use_isa(name)
    check_company(Case(heads, kv_heads, 64, 16, dtype, window=window))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_batch_and_chunks_change_no_bit_with_softcap_and_slopes(dtype):
    check_company(Case(9, 3, 64, 16, dtype, softcap=5.0, slopes=SLOPES))


def check_company(case):
    mixed = case.run(STEPS)
    for seq, out in mixed.items():
        alone = case.run([[(seq, 1)]] * len(out), threads=1)[seq]
        whole = case.run([[(seq, len(out))]], threads=3)[seq]
        assert np.array_equal(out, alone)
        assert np.array_equal(out, whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (40, 1)])
@pytest.mark.parametrize("window", [0, 10])
def test_many_decoding_sequences_equal_each_alone(heads, kv_heads, window):
    """So many that a thread takes all heads of a token. With 40 queries, a KV head is more than a tile."""
    num_seqs = 35
    case = Case(heads, kv_heads, 16, 16, window=window, seqs=num_seqs, length=40)
    lengths = {seq: 1 + 7 * seq % 38 for seq in range(num_seqs)}
    tokens = [[(seq, 1) for seq in lengths]] * 2
    for seq, out in case.run([[*lengths.items()], *tokens], threads=2).items():
        assert np.array_equal(out, case.run([[(seq, lengths[seq] + 2)]], threads=1)[seq])


def test_large_scores_do_not_overflow():
    case = Case(4, 2, 64, 16)
    case.rows *= 30  # scores of 10^4, whose fp32 rounding alone moves a weight by 10^-3
    out = case.run([[(0, 60)]])[0]
    assert max_error(out, case.plain(0, 60, np.float64)) < 1e-2 * np.abs(out).max()


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("window", [0, 30, 300])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, "float16"), (512, "float16"), (16, "int8"), (512, "int8")])
def test_a_long_context_is_the_same_whole_and_in_splits(name, window, block_size, dtype, restore_isa):
    """A prefill has tiles for all threads. The context of a single token is divided into splits of 256 positions."""
    use_isa(name)
    case = Case(6, 2, 24, block_size, dtype, window=window, seqs=1, length=805)
    whole = case.run([[(0, 805)]])[0]
    assert_right(name, case, whole)
    for threads in (1, 2, 3, 5):
        one_by_one = case.run([[(0, 250)], *([[(0, 1)]] * 8), [(0, 251)], *([[(0, 1)]] * 8), [(0, 288)]], threads)
        np.testing.assert_array_equal(one_by_one[0], whole)


def test_a_long_context_is_the_same_with_softcap_and_slopes():
    case = Case(6, 2, 24, 16, softcap=5.0, slopes=SLOPES[:6] / 64, seqs=1, length=805)
    whole = case.run([[(0, 805)]])[0]
    assert_right(available_isas()[0], case, whole)
    one_by_one = case.run([[(0, 796)], *([[(0, 1)]] * 9)])
    np.testing.assert_array_equal(one_by_one[0], whole)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", ["float16", "int8", "float32"])
@pytest.mark.parametrize(
    "adjusted", [{}, {"window": 100}, {"softcap": 5.0, "slopes": SLOPES / 64}, {"sinks": SINKS}, {"biases": BIASES}]
)
def test_shared_prefix_groups_equal_each_sequence_alone(name, dtype, adjusted, restore_isa):
    """Twelve sequences share the prefix of others: more than one tile of queries, in groups that diverge early (after
    one split of 256) or late (after two), beside a sequence that shares nothing and a chunk of a prefill."""
    use_isa(name)
    case = Case(9, 3, 16, 16, dtype, **adjusted, seqs=16, length=640)
    shared = dict.fromkeys(range(2, 14), (0, 592)) | {
        14: (0, 272),
        15: (1, 512),
    }  # (sequence, tokens) of the shared prefix
    lone, pool = Pool(case.spec, 2000), Pool(case.spec, 2000)
    case.num_blocks = 2000
    apart, together = case.program(3), case.program(2)
    for program, pages in ((apart, lone), (together, pool)):
        program.run(pages.batch([(0, case.ids(0, 0, 600))]))
        program.run(pages.batch([(1, case.ids(1, 0, 600))]))
    for seq, (owner, length) in shared.items():
        for pages in (lone, pool):  # `apart` reads them too, but one sequence per step
            pages.tables[seq], pages.computed[seq] = pages.tables[owner][: length // 16], length
    counts = {seq: 5 if seq == 13 else 1 for seq in range(16)}
    for step in range(2):
        runs = [(seq, case.ids(seq, 600 + 5 * step, 600 + 5 * step + n)) for seq, n in counts.items()]
        batch = pool.batch(runs)
        output = together.run(batch).copy()
        for i, run in enumerate(runs):
            alone = apart.run(lone.batch([run]))
            np.testing.assert_array_equal(output[batch.seq_starts[i] : batch.seq_starts[i + 1]], alone)

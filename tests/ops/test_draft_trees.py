"""Trees of drafts: a node sees its ancestors only, and on a CPU it has the bits that a chain of them would have."""

import random

import numpy as np
import pytest
import torch

from ops.native_harness import Pool, stored
from ops.test_native_attention import Case
from ops.test_native_latent import LatentCase
from quire.core.draft_tree import ROOT, ancestor_words, depths, path_to
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.opset import GpuOps
from quire.ops.kv_spec import KV_DTYPES, KVSpec
from quire.ops.native import NativeOps, available_isas, use_isa
from quire.ops.native.cache import NativeCache
from quire.ops.opset import ProgramSpec
from quire.ops.reference import TorchOps
from quire.runtime.batch import CAUSAL_WORDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    use_isa(available_isas()[0])


def random_parents(num_nodes, seed):
    chance = random.Random(seed)
    return [chance.choice([ROOT, node - 1, chance.randrange(ROOT, node)]) for node in range(num_nodes)]


def tree_batch(pool, runs, parents):
    """runs: (sequence, ids); the last len(parents) tokens of the first run are a tree."""
    batch = pool.batch(runs)
    counts = np.diff(batch.seq_starts)
    words = [CAUSAL_WORDS[:count] if count <= 64 else np.zeros(count, np.int64) for count in counts]
    num_known = int(counts[0]) - len(parents)
    root = num_known - 1
    of_tree = np.array(ancestor_words(parents), np.uint64) << np.uint64(root) | np.uint64((1 << num_known) - 1)
    words[0] = np.concatenate([words[0][:root], of_tree.view(np.int64)])
    batch.ancestors = np.concatenate(words)
    batch.positions[num_known : counts[0]] = batch.positions[root] + np.array(depths(parents))
    return batch


def as_chains(case, context, known, nodes, parents):
    """What each node gives at the end of a chain, of its ancestors alone: [nodes, columns]."""
    program, pool, rows = case.program(1), Pool(case.spec, case.num_blocks), []
    if context:
        program.run(pool.batch([(0, case.ids(0, 0, context))]))
    for node in range(len(parents)):
        pool.computed[0] = context  # the next chain is written over this one
        path = [nodes[n] for n in path_to(parents, node)]
        rows.append(program.run(pool.batch([(0, [*known, *path])]))[-1].copy())
    return np.array(rows)


def check_bits(case, context, num_nodes, num_known=1, seed=0, threads=2, others=()):
    """A tree behind a context beside other sequences: every node has the bits of its own chain."""
    parents = random_parents(num_nodes, seed)
    known = list(case.ids(0, context, context + num_known))
    nodes = random.Random(seed).choices(range(len(case.rows)), k=num_nodes)
    program, pool = case.program(threads), Pool(case.spec, case.num_blocks)
    if context:
        program.run(pool.batch([(0, case.ids(0, 0, context))]))
    out = program.run(tree_batch(pool, [(0, [*known, *nodes]), *others], parents))
    found = out[num_known : num_known + num_nodes].copy()
    expected = as_chains(case, context, known, nodes, parents)
    assert np.isfinite(expected).all() and np.array_equal(found, expected)
    return found


SHAPES = [
    (9, 3, 64, 16, "float16"),
    (14, 2, 32, 32, "float32"),
    (4, 1, 80, 8, "bfloat16"),
    (6, 2, 40, 16, "int8"),
    (5, 5, 24, 3, "float32"),
]


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_node_has_the_bits_of_a_chain(name, shape):
    """Trees that begin with a block, within one, and where spans and splits of a context end."""
    use_isa(name)
    case = Case(*shape, seqs=3, length=400)
    for seed, context in enumerate([0, 15, 16, 62, 250]):
        others = [(1, case.ids(1, 0, 1)), (2, case.ids(2, 0, 70))][: seed % 3]
        check_bits(case, context, num_nodes=(5, 12, 24, 63)[seed % 4], seed=seed, threads=1 + seed % 3, others=others)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 19},
        {"softcap": 3.0},
        {"slopes": [0.5, 0.1, 0.7, 0.2]},
        {"sinks": [0.5, -1.0, 2.0, 0.0]},
        {"biases": np.random.default_rng(0).normal(size=(4, 25))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_so_it_has_with_every_way_of_scoring(name, options):
    use_isa(name)
    case = Case(4, 2, 32, 16, seqs=1, length=200, **options)
    for seed, context in enumerate([3, 62]):
        check_bits(case, context, num_nodes=20, num_known=1 + seed, seed=seed)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_so_it_has_over_latent_pages(name, dtype):
    use_isa(name)
    for block_size in (16, 11):
        case = LatentCase(6, 24, 8, block_size, dtype, seqs=1, length=400)
        for seed, context in enumerate([0, 61, 250]):
            check_bits(case, context, num_nodes=20, seed=seed)


def test_a_tree_that_is_a_chain_is_computed_as_one():
    case = Case(9, 3, 64, 16, seqs=1, length=200)
    program, pool = case.program(), Pool(case.spec, case.num_blocks)
    program.run(pool.batch([(0, case.ids(0, 0, 50))]))
    plain = program.run(pool.batch([(0, case.ids(0, 50, 60))])).copy()
    pool.computed[0] = 50
    chain = tree_batch(pool, [(0, case.ids(0, 50, 60))], list(range(-1, 8)))
    assert chain.ancestors.tolist() == CAUSAL_WORDS[:10].tolist()
    assert np.array_equal(program.run(chain), plain)


def test_words_that_are_no_tree_are_refused():
    case = Case(4, 2, 16, 8, seqs=1)
    program = case.program()
    for token, word in ((1, 1), (1, 7), (2, 4 | 8), (3, 8 | 2), (2, 6)):  # not itself, later ones, not its parent's
        batch = tree_batch(Pool(case.spec, case.num_blocks), [(0, range(4))], [ROOT, ROOT, 1])
        batch.ancestors[token] = word
        with pytest.raises(ValueError, match=rf"ancestors\[{token}\] of a sequence is {word}, "):
            program.run(batch)
    batch = tree_batch(Pool(case.spec, case.num_blocks), [(0, range(4))], [ROOT, ROOT, 1])
    batch.positions[2] = 2
    with pytest.raises(ValueError, match=r"ancestors\[2\] of a sequence is 5, and its position is 2 instead of 1"):
        program.run(batch)
    batch.ancestors = batch.ancestors[:2]
    with pytest.raises(ValueError, match="ancestors has 2 entries, and must have 4"):
        program.run(batch)


def torch_program(case):
    ops, rows = TorchOps(), torch.tensor(case.rows)
    slopes = None if case.slopes is None else torch.tensor(case.slopes)

    def forward(ops, batch):
        q, k, v = ops.split(rows[batch.ids], case.columns)
        ops.write_kv(k, v, batch, 1)
        out = ops.paged_attention(q, batch, 1, case.head_dim, case.scale, case.window, slopes=slopes)
        return ops.rows(out, batch)

    return ops.compile(forward, ops.new_cache(case.spec, case.num_blocks), ProgramSpec(len(case.rows)))


def test_the_specification_sees_the_same():
    case = Case(4, 2, 32, 16, "float32", seqs=2, length=100, window=40, slopes=[0.5, 0.1, 0.7, 0.2])
    found = check_bits(case, 37, num_nodes=20)
    parents, pool = random_parents(20, 0), Pool(case.spec, case.num_blocks)
    program = torch_program(case)
    program.run(pool.batch([(0, case.ids(0, 0, 37))]))
    nodes = random.Random(0).choices(range(len(case.rows)), k=20)
    plain = program.run(tree_batch(pool, [(0, [37, *nodes])], parents))[1:].numpy()
    np.testing.assert_allclose(found, plain, atol=2e-5)


# -- on a GPU, or interpreted ------------------------------------------------------------------------------------------


def gpu_program(case, batch_invariant=False):
    ops = GpuOps(DEVICE, "float32", batch_invariant=batch_invariant, graphs=False)
    rows = torch.tensor(case.rows, device=DEVICE)
    slopes = None if case.slopes is None else torch.tensor(case.slopes, device=DEVICE)

    def forward(ops, batch):
        q, k, v = ops.split(rows[batch.ids.ids.long()], case.columns)
        ops.write_kv(k, v, batch, 1)
        out = ops.paged_attention(q, batch, 1, case.head_dim, case.scale, case.window, slopes=slopes)
        return ops.rows(out, batch)

    cache = ops.new_cache(case.spec, case.num_blocks)
    return ops.compile(forward, cache, ProgramSpec(len(case.rows), 8, case.length))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [0, 9])
def test_a_gpu_sees_the_same(dtype, window):
    """Beside a decoding sequence, a short prompt, and a prompt that is too long for a word."""
    case = Case(4, 2, 32, 16, dtype, seqs=4, length=100, window=window)
    others = [(1, case.ids(1, 0, 1)), (2, case.ids(2, 0, 9)), (3, case.ids(3, 0, 70))]
    expected, found = (tree_outputs(program, case, 20, 14, others) for program in (case.program(), gpu_program(case)))
    np.testing.assert_allclose(found, expected, atol=2e-3 if dtype == "int8" else 2e-5)


@pytest.mark.parametrize("context", [0, 37])
def test_batch_invariant_nodes_have_the_bits_of_a_chain(context):
    case = Case(4, 2, 32, 16, "float32", seqs=3, length=100)
    program, parents = gpu_program(case, batch_invariant=True), random_parents(12, 0)
    nodes = random.Random(0).choices(range(len(case.rows)), k=12)
    others = [(1, case.ids(1, 0, 1)), (2, case.ids(2, 0, 9))]
    found = tree_outputs(program, case, context, 12, others)
    pool = Pool(case.spec, case.num_blocks)
    if context:
        program.run(pool.batch([(0, case.ids(0, 0, context))]))
    for node in range(12):
        pool.computed[0] = context
        chain = [context, *(nodes[n] for n in path_to(parents, node))]
        assert torch.equal(program.run(pool.batch([(0, chain)]))[-1].cpu(), torch.tensor(found[1 + node]))


def tree_outputs(program, case, context, num_nodes, others):
    """The outputs of a step with a tree behind a context, and with others."""
    pool = Pool(case.spec, case.num_blocks)
    if context:
        program.run(pool.batch([(0, case.ids(0, 0, context))]))
    nodes = random.Random(0).choices(range(len(case.rows)), k=num_nodes)
    out = program.run(tree_batch(pool, [(0, [context, *nodes]), *others], random_parents(num_nodes, 0)))
    return out.float().cpu().numpy() if isinstance(out, torch.Tensor) else out.copy()


# -- a tree that grows -------------------------------------------------------------------------------------------------


def grown_outputs(program, case, context, parents, nodes, sizes):
    """The outputs of a tree's nodes, so many in each step, behind a context and one token more."""
    pool, done, rows = Pool(case.spec, case.num_blocks), 0, []
    program.run(pool.batch([(0, case.ids(0, 0, context + 1))]))
    words, levels = np.array(ancestor_words(parents)[1:], np.uint64) >> np.uint64(1), np.array(depths(parents))
    for size in sizes:
        batch = pool.batch([(0, nodes[done : done + size]), (1, case.ids(1, done, done + size))])
        of_tree = slice(done, done + size)
        batch.ancestors = np.concatenate([words[of_tree].view(np.int64), CAUSAL_WORDS[:size]])
        batch.positions[:size] = context + levels[of_tree]
        out = program.run(batch)[:size]
        rows.append(out.float().cpu().numpy() if isinstance(out, torch.Tensor) else out.copy())
        done += size
    return np.concatenate(rows)


SIZES = (4, 1, 7, 30, 21)


def grown_tree(case, seed, sizes):
    parents = random_parents(sum(sizes), seed)
    return parents, random.Random(seed).choices(range(len(case.rows)), k=len(parents))


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_of_later_steps_have_the_bits_of_a_chain(name, shape):
    """A step computes new nodes alone: keys and values of those before are in their places."""
    use_isa(name)
    case = Case(*shape, seqs=2, length=400)
    for seed, context in enumerate([0, 61]):
        parents, nodes = grown_tree(case, seed, SIZES)
        found = grown_outputs(case.program(1 + seed % 2), case, context, parents, nodes, SIZES)
        assert np.array_equal(found, as_chains(case, context, [context], nodes, parents))


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"slopes": [0.5, 0.1, 0.7, 0.2]}], ids=str)
def test_other_devices_see_the_same_in_later_steps(options):
    case = Case(4, 2, 32, 16, "float32", seqs=2, length=150, **options)
    sizes = (3, 1, 4)  # across place 64, where the splits of a context may begin
    parents, nodes = grown_tree(case, 3, sizes)
    expected = grown_outputs(case.program(), case, 62, parents, nodes, sizes)
    for program in (torch_program(case), gpu_program(case), gpu_program(case, batch_invariant=True)):
        found = grown_outputs(program, case, 62, parents, nodes, sizes)
        np.testing.assert_allclose(found, expected, atol=2e-5)


# -- keys and values that move ----------------------------------------------------------------------------------------

MOVES = [(5, 4), (9, 5), (17, 9), (40, 10), (10, 3)]  # in order: what one reads, another writes


@pytest.mark.parametrize("spec", [
    KVSpec(3, 2, 16, 8, "float16"),
    KVSpec(2, 3, 5, 3, "float32"),
    KVSpec(2, 1, 9, 16, "bfloat16"),
    KVSpec(2, 2, 20, 16, "int8"),
    KVSpec(2, 1, 12, 5, "float16", latent=7),
], ids=str)  # fmt: skip
def test_moved_tokens_are_as_if_they_had_been_written_there(spec):
    """In a CPU's layout: a cache whose tokens were moved, beside one into which they were written."""
    rng, num_blocks = np.random.default_rng(0), 50 // spec.block_size + 1
    width = spec.latent or spec.head_dim * spec.num_kv_heads
    widths = [width, spec.head_dim - spec.latent] if spec.latent else [width, width]
    vectors = rng.normal(size=(50, sum(widths))).astype(np.float32)
    ops = NativeOps(1)
    table, eye = ops.table(stored(vectors)), ops.pack([stored(np.eye(sum(widths)))])

    def forward(ops, batch):
        x = ops.embedding(batch.ids, table)
        for layer in range(spec.num_layers):
            write = ops.write_latent if spec.latent else ops.write_kv
            write(*ops.split(x, widths), batch, layer)
        return ops.logits(x, eye, batch)

    def filled(order):
        cache = ops.new_cache(spec, num_blocks)
        cache.pages.fill(0)
        batch = Pool(spec, num_blocks).batch([(0, order)])
        batch.slots = np.arange(50, dtype=np.int32)
        ops.compile(forward, cache, ProgramSpec(50)).run(batch)
        return cache

    order = list(range(50))
    moved = filled(order)
    moved.move(MOVES)
    for source, target in MOVES:
        order[target] = order[source]
    assert np.array_equal(moved.pages, filled(order).pages)
    with pytest.raises(ValueError, match="copy of slot 1 to slot 999"):
        moved.move([(1, 999)])


@pytest.mark.parametrize("dtype", [*KV_DTYPES, "fp8"])
@pytest.mark.parametrize("latent", [0, 8])
def test_moved_tokens_of_torch_pages(dtype, latent):
    """As if pair by pair, in every layer. Compiled where there is a GPU."""
    if latent and dtype == "int8":
        return
    spec = KVSpec(2, 1 if latent else 3, 16, 8, dtype, latent)
    cache = GpuCache(spec, 7, 0, DEVICE)
    for page in cache.pages:
        page.copy_(torch.randint(0, 99, page.shape, generator=torch.Generator().manual_seed(1)).float().to(page.dtype))
    plain = [page.clone().float().flatten(1, 2) for page in cache.pages]
    cache.move(MOVES)
    for page in plain:
        for source, target in MOVES:
            page[:, target] = page[:, source]
    for page, expected in zip(cache.pages, plain, strict=True):
        assert torch.equal(page.float().flatten(1, 2), expected)


def test_the_native_cache_has_a_place_for_every_token():
    for dtype in KV_DTYPES:
        cache = NativeCache(KVSpec(1, 1, 16, 16, dtype), 3)
        cache.pages[:] = np.random.default_rng(0).integers(0, 255, len(cache.pages), dtype=np.uint8)
        before = cache.pages.copy()
        cache.move([(slot, slot) for slot in range(48)])
        assert np.array_equal(before, cache.pages)
        cache.move([(0, slot) for slot in range(48)])
        blocks = cache.pages[: 3 * cache.spec.block_bytes].reshape(3, -1)
        assert (blocks == blocks[0]).all() and not np.array_equal(before, cache.pages)

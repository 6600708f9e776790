"""Sparse attention (DSA) beside its plain twin, on a GPU or in Triton's interpreter: the indexer's keys and scores, the
choice of positions, and attention to them."""

import numpy as np
import pytest
import torch

from quire.ops.gpu.attention import indexer, top_k
from quire.ops.gpu.attention.indexer import choose_slots, write_index_key
from quire.ops.gpu.attention.mla import mla_decode
from quire.ops.gpu.attention.mla_plan import plan_sparse
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.attention.top_k import SeenPositions, seen_positions, select_slots
from quire.ops.kv_spec import IndexSpec, KVSpec
from quire.ops.reference.cache import TorchCache
from quire.ops.reference.rope import rotate_heads
from quire.ops.reference.sparse_attention import sparse_attention, top_positions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENT, ROPE, BLOCK = 16, 4, 8
# tokens of each sequence in this step, and its context with them
COUNTS, CONTEXTS = [5, 1, 3, 1], [37, 60, 3, 12]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def integers(*shape, seed=0):
    """Small ones: scores are exact, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Step:
    """Sequences in random blocks of a cache of two layers, the keys of whose indexers are small integers."""

    def __init__(self, chosen, columns=16, dtype="float32", counts=COUNTS, contexts=CONTEXTS):
        self.counts, self.contexts, self.chosen = counts, contexts, chosen
        self.spec = KVSpec(2, 1, LATENT + ROPE, BLOCK, dtype, LATENT, index=IndexSpec(columns, chosen))
        width = -(-max(contexts) // BLOCK)
        self.cache = TorchCache(self.spec, width * len(counts) + 3, 0, DEVICE)
        self.cache.k.copy_(random(*self.cache.k.shape, seed=1))
        self.cache.index_keys.copy_(integers(*self.cache.index_keys.shape, seed=2))
        order = torch.randperm(width * len(counts) + 3, generator=torch.Generator().manual_seed(3))
        self.tables = order[: width * len(counts)].view(len(counts), width).to(DEVICE)
        self.starts = np.cumsum([0, *counts]).tolist()
        self.positions = np.concatenate([np.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)])
        self.owners = np.repeat(np.arange(len(counts)), counts)

    def seen(self, tokens=slice(None), padding=0) -> SeenPositions:
        """What some tokens see, each a sequence of its own; or all of them in their sequences, and some padding."""
        if tokens == slice(None):
            extra = [self.starts[-1]] * (1 if padding else 0)
            tables = torch.cat([self.tables, self.tables.new_zeros(len(extra), self.tables.shape[1])])
            runs = Runs(int32([*self.starts, *extra]), int32([*self.contexts, *[0] * len(extra)]), tables.int())
            positions = int32([*self.positions, *[0] * padding])
        else:
            positions = int32(self.positions[tokens])
            starts = int32(list(range(len(positions) + 1)))
            runs = Runs(starts, positions + 1, self.tables[self.owners[tokens]].int())
        slots = torch.ones_like(positions)
        slots[len(positions) - padding :] = -1
        return seen_positions(runs, positions, slots, BLOCK, self.chosen)

    def runs(self):
        return self.starts, self.contexts, self.tables

    def as_positions(self, slots):
        """[T, top_k] slots -> positions."""
        found = []
        for owner, row in zip(self.owners, slots.tolist(), strict=False):
            places = {int(block): i * BLOCK for i, block in enumerate(self.tables[owner])}
            found.append([-1 if slot < 0 else places[slot // BLOCK] + slot % BLOCK for slot in row])
        return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("columns", "rope"), [(16, 8), (20, 6), (8, 8), (9, 0)])
def test_keys_are_rotated_and_stored(dtype, columns, rope):
    step = Step(4, columns, dtype)
    before, slots = step.cache.index_keys.clone(), [17, 3, -1, 8]
    k, angles = random(4, columns + 3)[:, 3:], random(4, rope, seed=1) if rope else None
    write_index_key(k, angles, int32(slots), step.cache.index_keys[1])
    rotated = k if angles is None else rotate_heads(k[:, None], angles)[:, 0]
    kept = [0, 1, 3]
    wanted = before.clone()
    wanted[1].flatten(0, 1)[torch.tensor(slots)[kept].to(DEVICE)] = rotated[kept].to(wanted.dtype)
    apart = 2**-7 if dtype == "bfloat16" and DEVICE == "cpu" else 0.0  # the interpreter cuts off where others round
    torch.testing.assert_close(step.cache.index_keys.float(), wanted.float(), rtol=apart, atol=apart / 10)


@pytest.mark.parametrize("chosen", [1, 7, 20, 64])
@pytest.mark.parametrize(("heads", "columns"), [(3, 9), (16, 16), (5, 33)])
@pytest.mark.parametrize("tile", [32, top_k.TILE])
def test_the_best_positions_are_those_of_the_plain_twin(monkeypatch, chosen, heads, columns, tile):
    monkeypatch.setattr(top_k, "TILE", tile)
    step, num_tokens = Step(chosen, columns), sum(COUNTS)
    q, weights = integers(num_tokens + 2, heads * columns, seed=4), integers(num_tokens + 2, heads + 1, seed=5)[:, 1:]
    heads_of = q[:num_tokens].unflatten(1, (heads, columns))
    wanted = top_positions(heads_of, weights[:num_tokens], step.cache, 1, *step.runs())
    slots = choose_slots(q, weights, None, step.cache.index_keys[1], step.seen(padding=2))
    assert step.as_positions(slots) == wanted.long().tolist()
    assert (slots[num_tokens:] == -1).all()


def test_queries_are_rotated_as_keys_are():
    heads, columns, rope = 4, 16, 8
    step, num_tokens = Step(7, columns), sum(COUNTS)
    q, weights, angles = random(num_tokens, heads * columns), random(num_tokens, heads), random(num_tokens, rope)
    rotated = rotate_heads(q.unflatten(1, (heads, columns)), angles)
    wanted = top_positions(rotated, weights, step.cache, 0, *step.runs())
    assert step.as_positions(choose_slots(q, weights, angles, step.cache.index_keys[0], step.seen())) == wanted.tolist()


def test_few_scores_at_a_time_and_other_tokens_change_no_choice(monkeypatch):
    heads, columns, num_tokens = 3, 20, sum(COUNTS)
    step = Step(7, columns)
    step.cache.index_keys.copy_(random(*step.cache.index_keys.shape))
    q, weights, page = random(num_tokens, heads * columns), random(num_tokens, heads), step.cache.index_keys[1]
    whole = choose_slots(q, weights, None, page, step.seen())
    monkeypatch.setattr(indexer, "SCORE_BYTES", 3 * 4 * step.seen().width)
    assert torch.equal(choose_slots(q, weights, None, page, step.seen()), whole)
    for token in (0, 5, 8, 9):
        tokens = slice(token, token + 1)
        assert torch.equal(choose_slots(q[tokens], weights[tokens], None, page, step.seen(tokens)), whole[tokens])


def test_numbers_that_are_none_are_chosen_last():
    step = Step(36, 16, counts=[1], contexts=[40])
    q, weights = random(1, 32).abs(), random(1, 2).abs()
    slot = int(step.tables[0, 2]) * BLOCK + 3
    step.cache.index_keys[0].flatten(0, 1)[slot] = float("nan")
    slots = choose_slots(q, weights, None, step.cache.index_keys[0], step.seen())
    wanted = top_positions(q.unflatten(1, (2, 16)), weights, step.cache, 0, *step.runs())
    assert step.as_positions(slots) == wanted.tolist()
    assert slot not in slots.tolist()[0]


@pytest.mark.parametrize("kind", ["normal", "few", "equal", "wide", "sorted", "infinite"])
def test_selection_among_many_scores(kind):
    """Against a stable sort."""
    length, chosen, generator = 3000, 512, np.random.default_rng(7)
    scores = generator.normal(size=length).astype(np.float32)
    scores = {
        "normal": scores,
        "few": np.round(scores),
        "equal": np.zeros_like(scores),
        "wide": scores * 10.0 ** generator.integers(-30, 30, length).astype(np.float32),
        "sorted": np.sort(scores),
        "infinite": np.where(scores > 0, np.inf, -np.inf).astype(np.float32),
    }[kind]
    bits = scores.view(np.int32)
    ordered = torch.from_numpy(bits ^ ((bits >> 31) & 0x7FFFFFFF))[None].to(DEVICE)
    tables = torch.arange(-(-length // 16), dtype=torch.int32, device=DEVICE)[None]
    seen = SeenPositions(int32([length]), int32([0]), tables, 16, chosen)
    padded = torch.zeros(1, seen.width, dtype=torch.int32, device=DEVICE)
    padded[:, :length] = ordered
    out = torch.empty(1, chosen, dtype=torch.int32, device=DEVICE)
    select_slots(padded, seen, range(1), out)
    wanted = np.sort(np.argsort(-scores.astype(np.float64), kind="stable")[:chosen])
    assert out[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("chosen", "heads"), [(1, 3), (7, 20), (64, 5)])
def test_tokens_attend_to_what_they_choose(batch_invariant, chosen, heads):
    step, num_tokens = Step(chosen), sum(COUNTS)
    index_q, weights = integers(num_tokens + 2, 48, seed=4), integers(num_tokens + 2, 3, seed=5)
    q, page = random(num_tokens + 2, heads, LATENT + ROPE, seed=6), step.cache.k[1, :, :, 0]

    def attend(tokens, seen):
        slots = choose_slots(index_q[tokens], weights[tokens], None, step.cache.index_keys[1], seen)
        plan = plan_sparse(seen, num_heads=heads, dtype=q.dtype, batch_invariant=batch_invariant)
        given = q[tokens], page, plan.runs, plan.pieces, 0.3
        return mla_decode(*given, latent=LATENT, launch=plan.launch, chosen=slots)

    found = attend(slice(None), step.seen(padding=2))
    positions = top_positions(
        index_q[:num_tokens].unflatten(1, (3, 16)), weights[:num_tokens], step.cache, 1, *step.runs()
    )
    wanted = sparse_attention(q[:num_tokens], step.cache, 1, *step.runs(), 0.3, positions)
    torch.testing.assert_close(found[:num_tokens], wanted, rtol=1e-4, atol=1e-5)
    assert not found[num_tokens:].any()
    for token in (0, 4, 5, 9):
        tokens = slice(token, token + 1)
        near = 0.0 if batch_invariant else 1e-5
        torch.testing.assert_close(attend(tokens, step.seen(tokens))[0], found[token], rtol=near, atol=near)

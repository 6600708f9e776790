"""Trees of drafts that wait on the device: a step and the sampler find there what the host would have told them."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.one_sampler import PLAIN
from quire.core.draft_tree import ROOT, UNKNOWN_PARENT, accepted_path, ancestor_words, depths
from quire.ops.gpu.accepted_trees import follow_accepted_branch, move_levels
from quire.ops.gpu.aligned import pack, views
from quire.ops.gpu.sampling.accept import MAX_PATH
from quire.ops.gpu.sampling.job import FIELDS, NUM_TOKENS
from quire.ops.gpu.sampling.kept_trees import look_up_tokens
from quire.ops.gpu.sampling.sampler import DeviceSampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, BLOCK = 24, 4
Tree = tuple[list[int], list[int]]


def random_tree(seed: int, num_nodes: int, num_levels: int) -> Tree:
    """Siblings have different tokens."""
    chance = random.Random(seed)
    parents: list[int] = []
    while len(parents) < num_nodes:
        parent = chance.randrange(ROOT, len(parents))
        if parent == ROOT or depths(parents)[parent] < num_levels:
            parents.append(parent)
    return [(7 * node + seed) % VOCAB for node in range(num_nodes)], parents


def kept_by(sampler: DeviceSampler, trees: dict[int, Tree], num_levels: int) -> None:
    """As a head leaves them: one more sequence is padding."""
    found = np.array(
        [[tokens, parents, [0] * len(tokens)] for tokens, parents in [*trees.values(), ([9] * 11, [ROOT] * 11)]]
    )
    rows = torch.tensor([*trees, -1], dtype=torch.int32, device=DEVICE)
    sampler.keep_trees(torch.from_numpy(found).int().to(DEVICE), rows, num_levels)
    sampler.unknown_depth = num_levels


def kept_ids(sampler: DeviceSampler, row: int, count: int) -> list[int]:
    return [~(row + (1 + node) * sampler.num_rows) for node in range(count)]


def test_a_step_finds_positions_and_words() -> None:
    """Beside a token that is known, one that was sampled last, and a chain of kept drafts."""
    sampler = DeviceSampler(3, VOCAB, DEVICE)
    trees = {2: random_tree(1, 11, 4), 0: random_tree(2, 11, 4)}
    kept_by(sampler, trees, 4)
    ids = [5, *kept_ids(sampler, 2, 11), ~1, *kept_ids(sampler, 0, 9), 8, *kept_ids(sampler, 1, 2)]
    positions = [30] * 12 + [40] * 10 + [50, 51, 52]
    words = [1] + [0] * 11 + [1] + [0] * 9 + [1, 3, 7]
    on_device = [torch.tensor(one, device=DEVICE) for one in (ids, positions, words)]
    of_step = on_device[0].int(), on_device[1].int(), on_device[2]
    look_up_tokens(*of_step, sampler.trees)
    of_trees = [trees[2][1], trees[0][1][:9]]
    assert of_step[0].tolist() == ids
    assert of_step[1].tolist() == [
        30,
        *(30 + d for d in depths(of_trees[0])),
        40,
        *(40 + d for d in depths(of_trees[1])),
        50,
        51,
        52,
    ]
    assert of_step[2].tolist() == [*ancestor_words(of_trees[0]), *ancestor_words(of_trees[1]), 1, 3, 7]
    tokens = sampler.last.tolist()
    assert [tokens[~one] for one in ids[1:12]] == trees[2][0]


@pytest.mark.parametrize("logprobs", [-1, 1])
def test_a_tree_that_only_the_device_knows_is_verified_as_any_other(logprobs: int) -> None:
    """Beside a tree that is known, and a chain."""
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = []
    for is_known in (False, True):
        sampler = DeviceSampler(3, VOCAB, DEVICE)
        for row in range(3):
            sampler.admit(row, replace(PLAIN, seed=row, temperature=0.9 * (row != 1), num_logprobs=logprobs), [1, 2], 2)
        alone = [draw.tokens for draw in sampler.verify(logits[:1], [2], [[]])()]  # the root's token is drafted
        sampler.retire(2)
        sampler.admit(2, replace(PLAIN, seed=2, temperature=0.9, num_logprobs=logprobs), [1, 2], 2)
        trees = {2: random_tree(1, 11, 3), 0: random_tree(3, 11, 3)}
        trees[2][0][trees[2][1].index(ROOT)] = alone[0][0]
        kept_by(sampler, trees, 3)
        rows, drafts, parents = (
            [2, 1, 0],
            [list(trees[2][0][:10]), [4, 5], list(trees[0][0])],
            [list(trees[2][1][:10]), [], trees[0][1]],
        )
        unknown = [UNKNOWN_PARENT] * 10
        given = [parents[0] if is_known else unknown, *parents[1:]]
        ids = [drafts[0] if is_known else kept_ids(sampler, 2, 10), *drafts[1:]]
        finish = sampler.verify(logits[: 10 + 2 + 11 + 3], rows, ids, None, given)
        ids[0][:], unknown[:] = drafts[0], parents[0]
        sampled = finish()
        paths, lengths = sampler.paths.tolist(), sampler.params[:, NUM_TOKENS.value].tolist()
        for one, of_row, tree in zip(sampled, drafts, parents, strict=True):
            path = [1 + node for node in accepted_path(of_row, tree, one.tokens)]
            assert paths[one.row][1 : 1 + len(path)] == path and lengths[one.row] == 3 + len(path)
        found.append((sampled, lengths, sampler.last.tolist()[:3]))
    assert found[0] == found[1]
    assert len(found[0][0][0].tokens) > 1


@pytest.mark.parametrize("num_levels", [1, 2, 4])
def test_a_tree_goes_on_behind_the_accepted_branch(num_levels: int) -> None:
    """Two of three sequences, in another order than their rows, and a sequence that is padding."""
    count, top_k, window, num_seqs = 5, 3, 20, 3
    rows, known, first_lines = [4, 1, -1], [18, 7, 0], [12, 0, 0]
    paths = np.zeros((6, MAX_PATH.value), np.int32)
    paths[4, 1:4], paths[1, 1] = [2, 5, 9], 8
    accepted = [3, 0]
    tokens = np.arange(100, 130, dtype=np.int32)
    tables = np.random.default_rng(0).permutation(60).reshape(num_seqs, 20).astype(np.int32)
    of_seqs, num_steps = np.full(num_seqs, -7, np.int32), num_levels - 1
    nodes = np.full(num_seqs * top_k, -7, np.int32)
    keys, more = np.full((num_levels, 2, num_seqs), -7, np.int32), np.arange(2 * num_seqs * (num_levels + count - 1))
    arrays = [np.full(num_seqs * count, -7, np.int32)] * 2 + [np.array(rows, np.int32), of_seqs]
    arrays += [np.array(first_lines, np.int32), np.array(known, np.int32), tokens, paths, keys]
    arrays += [
        more.astype(np.int32).reshape(-1, 2, num_seqs),
        tables,
        *[of_seqs] * num_steps,
        *[nodes] * (2 * num_steps),
    ]
    on_device = views(pack(arrays).to(DEVICE), [array.shape for array in arrays])
    (
        ids,
        hidden_rows,
        of_rows,
        logit_rows,
        firsts,
        of_known,
        of_lines,
        of_paths,
        of_keys,
        more_keys,
        of_tables,
        *steps,
    ) = on_device
    params = torch.zeros(6, FIELDS.value, dtype=torch.int64, device=DEVICE)
    for seq, num in enumerate(accepted):
        params[rows[seq], NUM_TOKENS.value] = known[seq] + num + 1
    first_step = ids, hidden_rows, of_rows, logit_rows
    follow_accepted_branch(first_step, (firsts, of_known), of_lines, params, of_paths, window)
    of_steps = [steps[i * num_steps :][:num_steps] for i in range(3)]
    move_levels(logit_rows, of_known, of_rows, of_steps, of_keys, more_keys, of_tables, count, BLOCK)
    assert logit_rows.tolist() == [3, 5, -7]
    for seq, num in enumerate(accepted):
        lines = [0, *paths[rows[seq], 1 : 1 + num].tolist()]
        void = [0] * (count - 1 - num)
        of_seq = slice(seq * count, (seq + 1) * count)
        assert ids.tolist()[of_seq] == [*(int(tokens[first_lines[seq] + line]) for line in lines), *void]
        places = [known[seq] - 1 + line for line in [*lines, *void]]
        assert hidden_rows.tolist()[of_seq] == [rows[seq] * window + place % window for place in places]
        for step in range(num_steps):
            contexts, positions, slots = (of_steps[i][step].tolist() for i in range(3))
            first, of_nodes = known[seq] + num, slice(seq * top_k, (seq + 1) * top_k)
            truth = [first + step * top_k + node for node in range(top_k)]
            assert contexts[seq] == first + (step + 1) * top_k and positions[of_nodes] == [first + step] * top_k
            assert slots[of_nodes] == [tables[seq, place // BLOCK] * BLOCK + place % BLOCK for place in truth]
        assert of_keys[:, :, seq].tolist() == more_keys[num : num + num_levels, :, seq].tolist()
    assert set(ids.tolist()[2 * count :]) == {-7} and set(of_keys[:, :, 2].flatten().tolist()) == {-7}

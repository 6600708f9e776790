"""Drafts are verified as if their tokens were drawn one by one."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.draws import draws, grow_tree
from ops.one_sampler import PLAIN, bell
from quire.core.watermark import Watermark
from quire.ops.native.sampler import NativeSampler
from quire.ops.opset import Masks
from quire.ops.reference.sampler import TorchSampler
from quire.ops.row_params import DryParams, MirostatParams

VOCAB = 24
WISHES = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filtered": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "typical": {"typical_p": 0.7},
    "penalized": {"repetition_penalty": 1.4, "frequency_penalty": 0.9, "presence_penalty": 0.3},
    "banned": {"banned": ((3, 5), (7,))},
    "not too short": {"min_tokens": 3, "stop_ids": (0, 1, 2)},
    "marked": {"watermark": Watermark(key=5, delta=3.0)},
    "logprobs": {"num_logprobs": 2},
    "dry": {"dry": DryParams(0.8, 1.75, 1), "no_repeat_ngram": 3},
    "xtc": {"xtc_probability": 0.5, "top_n_sigma": 1.5, "dynatemp_range": 0.5},
    "mirostat": {"mirostat": MirostatParams(2, tau=2.0, eta=0.5)},
}


@pytest.mark.parametrize("kind", [NativeSampler, TorchSampler])
@pytest.mark.parametrize("wishes", WISHES)
def test_verified_tokens_are_those_drawn_one_by_one(wishes, kind):
    """Two rows: whatever is guessed, and however far it is right, both samplers are then where the other one is."""
    params = replace(PLAIN, **WISHES[wishes])
    chance = np.random.default_rng(3)
    one_by_one, verified = kind(2, VOCAB), kind(2, VOCAB)
    for sampler in (one_by_one, verified):
        for row in range(2):
            sampler.admit(row, replace(params, seed=row), [1, 2, 3], 3)
    as_given = (lambda x: x) if kind is NativeSampler else torch.from_numpy
    for _ in range(12):
        drafts, expected, lines = [], [], []
        for row in range(2):
            logits = bell(VOCAB, 1 + int(chance.integers(5)), seed=int(chance.integers(1 << 30)))
            masks = Masks([0], np.full((1, 1), 0xFFFFF0, np.uint32))
            guesses, drawn = [], []
            for line in logits:
                drawn += draws(one_by_one.draw(as_given(line[None]), [row], masks)[0])
                guesses.append(drawn[-1].token if chance.random() < 0.8 else int(chance.integers(VOCAB)))
                if guesses[-1] != drawn[-1].token:
                    break
            guesses = [*guesses, *chance.integers(VOCAB, size=5).tolist()][: len(logits) - 1]
            expected, drafts, lines = [*expected, drawn], [*drafts, guesses], [*lines, logits]
        logits = np.concatenate(lines)
        masks = Masks(range(len(logits)), np.full((len(logits), 1), 0xFFFFF0, np.uint32))
        actual = verified.verify(as_given(logits), [0, 1], drafts, masks)()
        assert [draws(sampled) for sampled in actual] == expected


@pytest.mark.parametrize("kind", [NativeSampler, TorchSampler])
@pytest.mark.parametrize("wishes", WISHES)
def test_a_tree_is_walked_as_if_its_tokens_were_drawn_one_by_one(wishes, kind):
    """Each line with a mask of its own. A row without a tree stands between two that have one."""
    params, chance = replace(PLAIN, **WISHES[wishes]), random.Random(3)
    one_by_one, verified = kind(3, VOCAB), kind(3, VOCAB)
    for sampler in (one_by_one, verified):
        for row in range(3):
            sampler.admit(row, replace(params, seed=row), [1, 2, 3], 3)
    as_given = (lambda x: x) if kind is NativeSampler else torch.from_numpy
    num_accepted = 0
    for step in range(4):
        lines, bits, trees, expected = [], [], [], []
        for row in range(3):
            logits = bell(VOCAB, 20, seed=10 * step + row)
            allowed = np.array([[chance.getrandbits(24) | 0xF0F0] for _ in logits], np.uint32)
            drawn = []

            def draw(line, row=row, logits=logits, allowed=allowed, drawn=drawn):
                masks = Masks([0], allowed[line : line + 1])
                drawn += draws(one_by_one.draw(as_given(logits[line : line + 1]), [row], masks)[0])
                return drawn[-1].token

            tree = grow_tree(chance, VOCAB, 19 if row != 1 else 0, draw)
            lines, bits = [*lines, logits[: 1 + len(tree.tokens)]], [*bits, allowed[: 1 + len(tree.tokens)]]
            trees, expected = [*trees, tree], [*expected, drawn]
        logits, masks = np.concatenate(lines), Masks(range(sum(map(len, lines))), np.concatenate(bits))
        drafts, parents = [tree.tokens for tree in trees], [tree.parents for tree in trees]
        actual = verified.verify(as_given(logits), [0, 1, 2], drafts, masks, parents)()
        assert [draws(sampled) for sampled in actual] == expected
        num_accepted += sum(map(len, expected)) - 3
    assert num_accepted > 4


def test_parents_that_do_not_fit_their_drafts_are_refused():
    sampler = NativeSampler(1, VOCAB)
    sampler.admit(0, PLAIN, [1], 1)
    for parents in ([[-1]], [[-1, 0], []]):
        with pytest.raises(ValueError, match="parents"):
            sampler.verify(bell(VOCAB, 3), [0], [[4, 5]], None, parents)

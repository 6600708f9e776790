"""The filters and penalties of a sampler against exact probabilities, and against transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ops.draws import first_draws
from ops.one_sampler import FILTERS, GREEDY, PLAIN, bell, draw_one
from quire.ops.native.sampler import NativeSampler
from quire.ops.reference.filters import Survivors
from quire.ops.reference.sampler import SamplerRow, edit
from quire.ops.row_params import RowParams


def survivors(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The ids that the row's filters leave, by the specification."""
    left = Survivors(logits)
    left.filter(params, xtc_chance=0.0)
    return left.ids


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_exact_probabilities(name):
    """Chi-square of 20000 draws: below the 99.99th percentile, once and for all, as the seeds are fixed."""
    likely = [0.2, 0.02, 0.15, 0.01, 0.12, 0.1, 0.03, 0.09, 0.11, 0.005, 0.08, 0.085]
    logits = np.log(likely).astype(np.float32)
    params = RowParams(seed=0, sample=0, **FILTERS[name])
    rows = 2000
    sampler = NativeSampler(rows, 12)
    for row in range(rows):
        sampler.admit(row, replace(params, seed=row), [], 0)
    batch = np.tile(logits, (rows, 1))
    drawn = [draw.token for _ in range(10) for draw in first_draws(sampler.draw(batch, range(rows)))]
    observed = np.bincount(drawn, minlength=12)

    ids = survivors(torch.from_numpy(logits), params)
    p = np.zeros(12)
    p[ids] = np.exp(logits[ids].astype(np.float64) / params.temperature)
    p /= p.sum()
    assert (observed[p == 0] == 0).all()
    kept = p > 0
    expected = p[kept] * len(drawn)
    chi2 = float(((observed[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert freedom >= 2
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"typical_p": 0.5}, {0, 1}),
        ({"typical_p": 0.25}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
    ],
)
def test_examples_of_the_documentation(filters, kept):
    logits = np.log([0.40, 0.30, 0.15, 0.10, 0.05]).astype(np.float32)
    assert {draw_one(logits, replace(PLAIN, seed=seed, **filters)).token for seed in range(100)} == kept


@pytest.mark.parametrize("vocab", [20, 2000])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"top_p": 0.05}, [TopPLogitsWarper(0.05)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"typical_p": 0.6}, [TypicalLogitsWarper(0.6)]),
        ({"typical_p": 0.97}, [TypicalLogitsWarper(0.97)]),
        (
            {"top_k": 12, "top_p": 0.9, "min_p": 0.03, "typical_p": 0.8},
            [TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.03), TypicalLogitsWarper(0.8)],
        ),
    ],
)
def test_survivors_are_those_of_transformers(vocab, ours, theirs):
    for seed in range(20):
        logits = torch.from_numpy(bell(vocab, seed=seed))
        ids = survivors(logits[0], replace(PLAIN, **ours))
        scores = logits.double()
        for warper in theirs:
            scores = warper(None, scores)
        assert set(ids.tolist()) == set(scores[0].isfinite().nonzero().flatten().tolist())


def test_repetition_penalty_is_that_of_transformers():
    logits = torch.from_numpy(bell(50))
    tokens = [3, 4, 3, 17, 49]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits.clone())[0]
    edited = edit(logits[0], SamplerRow(replace(PLAIN, repetition_penalty=1.3), tokens, 2))
    assert torch.equal(edited, expected)


def test_penalties_are_the_naive_formulas():
    logits = bell(30)[0]
    params = replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, num_candidates=30)
    tokens, num_prompt = [1, 2, 2, 5, 2, 5, 9], 3
    expected = {}
    for token, x in enumerate(logits.astype(np.float64)):
        if token in tokens:
            x = x / 1.2 if x > 0 else x * 1.2
        count = tokens[num_prompt:].count(token)
        expected[token] = x - 0.25 * count - 0.5 * (count > 0)
    norm = math.log(sum(math.exp(x) for x in expected.values()))
    actual = draw_one(logits, params, tokens, num_prompt)
    assert {t: p + norm for t, p, _ in actual.logprobs} == pytest.approx(expected, abs=1e-5)

"""The race that picks a token: its numbers are exponential and independent, and all samplers hold the same race."""

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.shared_noise import race_agreement

from ops.draws import first_draws
from quire.ops.native.sampler import NativeSampler
from quire.ops.philox import random_bits
from quire.ops.race import exponentials, log, winner
from quire.ops.row_params import RowParams

PLAIN = RowParams(seed=0, sample=0)


def numbers(count: int, vocab: int) -> np.ndarray:
    """[count, vocab]: of one position of so many requests."""
    return np.stack([exponentials(random_bits(seed, 9, 0)[0], np.arange(vocab)) for seed in range(count)])


def test_the_logarithm_is_the_logarithm():
    x = np.concatenate([np.random.default_rng(0).random(10_000), [2.0**-53, 1 - 2.0**-53, 0.5, 0.75, 2.0**-0.5]])
    np.testing.assert_allclose(log(x), np.log(x), rtol=2e-15, atol=0)
    assert -log(np.array([2.0**-53]))[0] < 37.0  # the bound of native/src/race.h


def test_numbers_are_exponential():
    """Kolmogorov's distance, below its 99.99th percentile; and the smallest have as fine a grain as there is."""
    drawn = np.sort(1.0 - np.exp(-numbers(40, 5000).ravel()))
    n = len(drawn)
    ranks = np.arange(n) / n
    assert max((drawn - ranks).max(), (ranks + 1 / n - drawn).max()) < 2.2 / math.sqrt(n)
    assert len(np.unique(drawn)) == n and 0 < drawn[0] < 20 / n


@pytest.mark.parametrize("apart", [1, 2, 4, 16, 256, 4096])
def test_numbers_of_tokens_and_of_positions_do_not_depend_on_each_other(apart):
    uniform = np.exp(-numbers(30, 8192))
    limit = 4.5 / math.sqrt(uniform[:, apart:].size)
    assert abs(np.corrcoef(uniform[:, apart:].ravel(), uniform[:, :-apart].ravel())[0, 1]) < limit
    one, other = (np.exp(-exponentials(random_bits(5, 70 + k, 0)[0], np.arange(50_000))) for k in (0, apart))
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / math.sqrt(50_000)


def test_equal_times_go_to_the_lower_id():
    key = random_bits(1, 2, 3)[0]
    assert winner(key, np.array([7, 7, 3, 3]), np.array([5, 5, 0, 0])) == 7  # a weight of 0 does not run


def draw_all(logits: np.ndarray, count: int, temperature: float) -> np.ndarray:
    """One token of each of so many requests."""
    sampler = NativeSampler(count, len(logits))
    for seed in range(count):
        sampler.admit(seed, replace(PLAIN, seed=seed, temperature=temperature), [1, 2], 2)
    tokens = []
    for start in range(0, count, 500):
        rows = range(start, min(start + 500, count))
        tokens += [draw.token for draw in first_draws(sampler.draw(np.tile(logits, (len(rows), 1)), rows))]
    return np.array(tokens)


@pytest.mark.parametrize("scale, temperature", [(3.0, 1.0), (0.3, 1.0), (8.0, 1.7)])
def test_draws_of_a_large_vocabulary_follow_its_probabilities(scale, temperature):
    """Chi-square over bins of tokens that are equally likely together, rare ones among them."""
    vocab, count = 3000, 4000
    logits = (np.random.default_rng(1).normal(size=vocab) * scale).astype(np.float32)
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(p)
    bins = np.minimum((p[order].cumsum() * 25).astype(int), 24)
    of_token = np.empty(vocab, int)
    of_token[order] = bins
    expected = np.bincount(of_token, weights=p, minlength=25) * count
    observed = np.bincount(of_token[draw_all(logits, count, temperature)], minlength=25)
    kept = expected > 5
    chi2 = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert freedom >= 3 and chi2 < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_a_rougher_copy_of_the_model_mostly_draws_the_same_token():
    """As often as two races with the same numbers agree, which is near the most that is possible."""
    vocab, count, chance = 400, 4000, np.random.default_rng(2)
    exact = (chance.normal(size=vocab) * 2).astype(np.float32)
    rough = (exact + chance.normal(size=vocab) * 0.5).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (exact, rough))
    agreed = float((draw_all(exact, count, 1.0) == draw_all(rough, count, 1.0)).mean())
    expected, most = float(race_agreement(p, q).sum()), 1 - 0.5 * float(np.abs(p - q).sum())
    assert agreed == pytest.approx(expected, abs=4 * math.sqrt(0.25 / count))
    assert agreed > 0.85 * most > 0.6

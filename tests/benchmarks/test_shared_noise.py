"""The probabilities that a draft and the token are the same, against draws."""

import numpy as np
import pytest
from benchmarks.shared_noise import agreement


@pytest.mark.parametrize("vocab", [3, 40])
def test_agreement_is_that_of_draws(vocab: int) -> None:
    chance = np.random.default_rng(vocab)
    p = chance.dirichlet(np.ones(vocab))
    q = 0.5 * p + 0.5 * chance.dirichlet(np.ones(vocab))
    found = {way: float(joint.sum()) for way, joint in agreement(p, q).items()}
    exponential, uniform = chance.exponential(size=(50_000, vocab)), chance.random(50_000)
    race = (exponential / p).argmin(axis=1) == (exponential / q).argmin(axis=1)
    inverse = np.searchsorted(p.cumsum(), uniform, "right") == np.searchsorted(q.cumsum(), uniform, "right")
    assert found["race"] == pytest.approx(race.mean(), abs=0.01)
    assert found["inverse CDF"] == pytest.approx(inverse.mean(), abs=0.01)
    assert found["maximal"] == pytest.approx(1 - 0.5 * np.abs(p - q).sum()) and found["greedy"] == p[q.argmax()]
    assert found["inverse CDF"] < found["race"] <= found["maximal"] and agreement(p, p)["race"] == pytest.approx(p)

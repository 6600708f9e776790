"""Synthetic acceptance: drafts are accepted at given rates, which is said loudly; nothing else changes."""

import logging
from pathlib import Path
from typing import Any

import pytest

from fakes import make_drafts_free
from quire import LLM, SamplingParams

pytestmark = pytest.mark.slow


def synthetic(model: Path, **keys: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", **keys}
    llm = LLM(model, speculative_config=config, max_model_len=256)
    make_drafts_free(llm.engine._scheduler.speculation)
    return llm


def test_a_mean_length_is_reached_and_told(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = synthetic(tiny_model, synthetic_acceptance_length=2.5)
    assert "ANSWERS ARE NOT THE MODEL'S" in caplog.text and "2.50 tokens a step" in caplog.text
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=1, ignore_eos=True)
    outputs = llm.generate(["abc", "xyz"], params)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 200 and output.metrics is not None
        drafts = output.metrics.drafts
        assert drafts.num_verifications > 60 and sum(drafts.lengths[1:3]) > 0.95 * drafts.num_verifications
        assert 2.3 < 1 + drafts.num_accepted / drafts.num_verifications < 2.7


def test_rates_by_position(tiny_model: Path) -> None:
    llm = synthetic(tiny_model, synthetic_acceptance_rates=[0.8, 0.4, 0.0])
    llm.generate(["ab"] * 8, SamplingParams(max_tokens=150, temperature=1.0, seed=1, ignore_eos=True))
    stats = llm.engine.stats()
    first, second = (count / stats.drafts for count in stats.accepted_at)
    assert first == pytest.approx(0.8, abs=0.1) and second == pytest.approx(0.4, abs=0.1)


def test_it_is_never_on_by_default(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LLM(tiny_model, spec_method="ngram", max_model_len=256)
    assert "SYNTHETIC" not in caplog.text

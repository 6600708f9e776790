"""What tests of the samplers on the host share: parameters, logits, and one row's draw."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.draws import draws, first_draws
from quire.ops.native.sampler import NativeSampler
from quire.ops.row_params import RowParams

PLAIN = RowParams(seed=7, sample=0)
GREEDY = replace(PLAIN, temperature=0.0)
FILTERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.12},
    "typical_p": {"typical_p": 0.7},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
}


def bell(vocab: int, lines: int = 1, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, (lines, vocab)).astype(np.float32)


def draw_one(logits, params: RowParams, tokens=(), num_prompt=None, kind=NativeSampler):
    """One row's draw: a fresh sampler, as after an admission."""
    line = np.asarray(logits, dtype=np.float32)
    sampler = kind(1, len(line))
    sampler.admit(0, params, list(tokens), len(tokens) if num_prompt is None else num_prompt)
    lines = line[None] if kind is NativeSampler else torch.from_numpy(line)[None]
    return first_draws(sampler.draw(lines, [0]))[0]


def assert_same(native, spec) -> None:
    """Tokens, ids and ranks equal; logprobs equal but for the last bits of log()."""
    (native,), (spec,) = draws(native), draws(spec)
    assert native.token == spec.token
    assert [(token, rank) for token, _, rank in native.logprobs] == [(token, rank) for token, _, rank in spec.logprobs]
    assert [p for _, p, _ in native.logprobs] == pytest.approx([p for _, p, _ in spec.logprobs], rel=1e-12, abs=1e-12)

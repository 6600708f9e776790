"""DRY, XTC, mirostat, top-n-sigma, dynamic temperature, n-grams and the order of samplers: each against its published
definition, written in numpy here."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from quire.core.dry import DryBreaker
from quire.ops.native.sampler import NativeSampler
from quire.ops.philox import random_bits
from quire.ops.race import exponentials
from quire.ops.reference.sampler import TorchSampler
from quire.ops.row_params import DryParams, Filter, MirostatParams, RowParams

VOCAB, STEPS = 40, 25
PLAIN = RowParams(seed=3, sample=1)
BREAKERS = (DryBreaker([0, 9], []), DryBreaker([5], [6, 7]), DryBreaker([5], [6]))

# -- the definitions ---------------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class Candidates:
    """Ids and logits of the tokens that are left, the most likely first, as llama.cpp keeps them."""

    def __init__(self, logits: np.ndarray) -> None:
        self.ids = np.argsort(-logits, kind="stable")
        self.logits = logits[self.ids].astype(np.float64)

    def keep(self, kept: np.ndarray) -> None:
        self.ids, self.logits = self.ids[kept], self.logits[kept]

    @property
    def p(self) -> np.ndarray:
        return softmax(self.logits)


def top_k(left: Candidates, params: RowParams, chance: float) -> None:
    left.keep(np.arange(len(left.ids)) < params.top_k)


def top_p(left: Candidates, params: RowParams, chance: float) -> None:
    before = np.cumsum(left.p) - left.p
    left.keep(before < params.top_p)


def min_p(left: Candidates, params: RowParams, chance: float) -> None:
    left.keep(left.p >= params.min_p * left.p.max())


def typical_p(left: Candidates, params: RowParams, chance: float) -> None:
    entropy = -(left.p * np.log(left.p)).sum()
    order = np.argsort(np.abs(-np.log(left.p) - entropy), kind="stable")
    needed = np.cumsum(left.p[order]) - left.p[order] < params.typical_p
    left.keep(np.isin(np.arange(len(left.ids)), order[needed]))


def top_n_sigma(left: Candidates, params: RowParams, chance: float) -> None:
    """Tang et al., "Top-nσ: Not All Logits Are You Need", 2024."""
    left.keep(left.logits >= left.logits.max() - params.top_n_sigma * left.logits.std())


def temperature(left: Candidates, params: RowParams, chance: float) -> None:
    """llama.cpp's dynamic temperature: by the entropy, divided by that of as many equally likely tokens."""
    t, spread = params.temperature, params.dynatemp_range
    if spread > 0.0 and len(left.ids) > 1:
        normalised = -(left.p * np.log(left.p)).sum() / math.log(len(left.ids))
        low = max(t - spread, 0.0)
        t = low + (t + spread - low) * normalised**params.dynatemp_exponent
    left.logits = left.logits / t


def xtc(left: Candidates, params: RowParams, chance: float) -> None:
    """p-e-w, "Exclude Top Choices": of the tokens that reach the threshold only the least likely stays."""
    reaching = int((left.p >= params.xtc_threshold).sum())
    if chance < params.xtc_probability and reaching >= 2:
        left.keep(np.arange(len(left.ids)) >= reaching - 1)


def mirostat(left: Candidates, params: RowParams, mu: float) -> None:
    """Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", 2021."""
    if params.mirostat.version == 2:
        kept = -np.log2(left.p) <= mu
        kept[0] = True
        left.keep(kept)
        return
    p = left.p[:100]
    t = np.log([(i + 2) / (i + 1) for i in range(len(p) - 1)])
    b = np.log(p[:-1] / p[1:])
    s = (t * b).sum() / (t * t).sum()
    epsilon = s - 1.0
    k = ((epsilon * 2.0**mu) / (1.0 - VOCAB**-epsilon)) ** (1.0 / s)
    left.keep(np.arange(len(left.ids)) < max(int(k), 1))


def dry(logits: np.ndarray, params: RowParams, tokens: list[int]) -> np.ndarray:
    """p-e-w, "DRY: a modern repetition penalty": for every token, the longest end of the text that it would repeat."""
    out, wanted = logits.copy(), params.dry
    text = tokens if wanted.last_n < 0 else tokens[-wanted.last_n :]
    for token in set(text):
        longest = -1
        for at in [i for i in range(1, len(text)) if text[i] == token]:
            length = 0
            while (
                length < at
                and text[at - 1 - length] == text[len(text) - 1 - length]
                and not (crosses_breaker(wanted.breakers, text, length))
            ):
                length += 1
            longest = max(longest, length)
        single = any(token in breaker.heads and not breaker.tail for breaker in wanted.breakers)
        if longest >= wanted.allowed_length and not single:
            out[token] -= np.float32(wanted.multiplier * wanted.base ** (longest - wanted.allowed_length))
    return out


def crosses_breaker(breakers, text: list[int], length: int) -> bool:
    """Whether the token before the last `length` ones is part of a breaker that they follow."""
    end = len(text) - length
    written = [[head, *breaker.tail] for breaker in breakers for head in breaker.heads]
    return any(
        text[start : start + len(one)] == one and start < end <= start + len(one)
        for one in written
        for start in range(len(text) - len(one) + 1)
    )


# -- all samplers agree with them --------------------------------------------------------------------------------------

STEPS_BY_NAME = {
    Filter.TOP_N_SIGMA: top_n_sigma,
    Filter.TEMPERATURE: temperature,
    Filter.TOP_K: top_k,
    Filter.TOP_P: top_p,
    Filter.MIN_P: min_p,
    Filter.TYPICAL_P: typical_p,
    Filter.XTC: xtc,
}
ALL = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "top_n_sigma": 2.0, "temperature": 1.4}
LLAMA_CPP = ("TOP_N_SIGMA", "TOP_K", "TYPICAL_P", "TOP_P", "MIN_P", "XTC", "TEMPERATURE")
KINDS = {
    "dry": {"dry": DryParams(0.8, 1.75, 2)},
    "dry with breakers": {"dry": DryParams(0.8, 1.75, 1, breakers=BREAKERS)},
    "dry over few tokens": {"dry": DryParams(2.0, 1.1, 0, last_n=7)},
    "dry, greedy": {"dry": DryParams(3.0, 1.5, 1), "temperature": 0.0},
    "n-grams of 1": {"no_repeat_ngram": 1},
    "n-grams of 2": {"no_repeat_ngram": 2},
    "n-grams of 3": {"no_repeat_ngram": 3},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "dynatemp": {"dynatemp_range": 0.7, "dynatemp_exponent": 1.3},
    "dynatemp from 0": {"temperature": 0.5, "dynatemp_range": 2.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.08},
    "xtc always": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 1.5},
    "xtc, filtered": {"xtc_probability": 0.7, "top_k": 12, "min_p": 0.03},
    "mirostat 1": {"mirostat": MirostatParams(1, tau=2.0, eta=0.3), "order": (Filter.TEMPERATURE,)},
    "mirostat 2": {"mirostat": MirostatParams(2, tau=2.0, eta=0.3), "temperature": 1.2},
    "mirostat 2, followed at once": {"mirostat": MirostatParams(2, tau=3.0, eta=1.0)},
    "all": {**ALL, "xtc_probability": 0.5, "dry": DryParams(0.5), "dynatemp_range": 0.3},
    "llama.cpp's order": {**ALL, "xtc_probability": 0.5, "order": tuple(Filter[name] for name in LLAMA_CPP)},
    "backwards": {**ALL, "xtc_probability": 0.5, "dynatemp_range": 0.5, "order": tuple(reversed(Filter))},
}  # fmt: skip


def defined_token(logits: np.ndarray, params: RowParams, tokens: list[int], mu: float) -> tuple[int, float]:
    """The token, and mirostat's mu after it."""
    if params.no_repeat_ngram and len(tokens) + 1 >= params.no_repeat_ngram:
        processor = NoRepeatNGramLogitsProcessor(params.no_repeat_ngram)
        logits = processor(torch.tensor([tokens]), torch.from_numpy(logits)[None])[0].numpy()
    if params.dry:
        logits = dry(logits, params, tokens)
    if params.temperature == 0.0:
        return int(np.argmax(logits)), mu
    left = Candidates(logits)
    left.keep(left.logits > -np.inf)
    key, xtc_bits = random_bits(params.seed, len(tokens), params.sample)
    for filter in params.filters:
        STEPS_BY_NAME[filter](left, params, xtc_bits / 2**53)
    if params.mirostat:
        mirostat(left, params, mu)
    place = int(np.argmin(exponentials(key, left.ids) / left.p))
    surprise = -math.log2(left.p[place])
    if params.mirostat:
        mu -= params.mirostat.eta * (surprise - params.mirostat.tau)
    return int(left.ids[place]), mu


def lines(kind: str) -> tuple[np.ndarray, list[int]]:
    """Logits of a few steps, and tokens that repeat themselves."""
    generator = np.random.default_rng(len(kind))
    logits = generator.normal(0.0, 2.0, (STEPS, VOCAB)).astype(np.float32)
    logits[:, :4] += 3.0  # few likely tokens: what is said repeats
    return logits, generator.choice([1, 2, 3, 5, 6, 7, 9], 30).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler_class", [NativeSampler, TorchSampler])
def test_tokens_are_those_of_the_published_definition(kind, sampler_class):
    params = replace(PLAIN, **KINDS[kind])
    logits, tokens = lines(kind)
    sampler = sampler_class(1, VOCAB)
    sampler.admit(0, params, tokens, 20)
    as_given = (lambda x: x) if sampler_class is NativeSampler else torch.from_numpy
    mu = params.mirostat.initial_mu if params.mirostat else 0.0
    for line in logits:
        expected, mu = defined_token(line, params, tokens, mu)
        (sampled,) = sampler.draw(as_given(line[None]), [0])
        assert sampled.tokens == [expected]
        assert sampled.mu == (pytest.approx(mu, abs=1e-6) if params.mirostat else None)
        tokens.append(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_native_equals_the_specification_on_a_large_vocabulary(kind, scale):
    vocab, params = 5003, replace(PLAIN, **KINDS[kind])
    logits = np.random.default_rng(7).normal(0.0, scale, (6, vocab)).astype(np.float32)
    samplers = NativeSampler(1, vocab), TorchSampler(1, vocab)
    for sampler in samplers:
        sampler.admit(0, params, [1, 2, 3, 1, 2, 3, 1, 2], 5)
    for line in logits:
        native, spec = samplers[0].draw(line[None], [0]), samplers[1].draw(torch.from_numpy(line)[None], [0])
        assert native == spec


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("mirostat")])
@pytest.mark.parametrize("sampler_class", [NativeSampler, TorchSampler])
def test_a_row_admitted_with_the_mu_it_had_goes_on_as_if_it_had_stayed(kind, sampler_class):
    params, (logits, tokens) = replace(PLAIN, **KINDS[kind]), lines(kind)
    as_given = (lambda x: x) if sampler_class is NativeSampler else torch.from_numpy
    stays, moves = sampler_class(1, VOCAB), sampler_class(1, VOCAB)
    stays.admit(0, params, tokens, 30)
    mu = None
    for line in logits:
        moves.admit(0, params, tokens, 30, mu)
        (undisturbed,), (moved,) = stays.draw(as_given(line[None]), [0]), moves.draw(as_given(line[None]), [0])
        assert moved == undisturbed
        moves.retire(0)
        tokens, mu = tokens + moved.tokens, moved.mu


@pytest.mark.parametrize("sampler_class", [NativeSampler, TorchSampler])
def test_extreme_logits_and_parameters_leave_a_token(sampler_class):
    """Overflows of mu, of the penalty, and of standard deviations."""
    wishes = [
        {"mirostat": MirostatParams(1, tau=100.0, eta=100.0)},
        {"mirostat": MirostatParams(2, tau=0.0, eta=100.0)},
        {"dry": DryParams(100.0, 100.0, 0)},
        {"top_n_sigma": 1e-9, "xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"dynatemp_range": 100.0, "dynatemp_exponent": 0.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, "temperature": 0.01, "order": tuple(reversed(Filter))},
    ]
    odd = [3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 0.0, -1e4, -1e9]
    logits = np.array([[*odd, *range(8)], range(16), [0.0] * 16, [-math.inf] * 15 + [1.0]], np.float32)
    as_given = (lambda x: x) if sampler_class is NativeSampler else torch.from_numpy
    for wish in wishes:
        sampler = sampler_class(1, 16)
        sampler.admit(0, replace(PLAIN, **wish), [1] * 200, 3)
        for line in [*logits, *logits, *logits]:
            (sampled,) = sampler.draw(as_given(line[None]), [0])
            assert len(sampled.tokens) == 1 and 0 <= sampled.tokens[0] < 16

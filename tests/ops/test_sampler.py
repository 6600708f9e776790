"""The native sampler against its specification in torch, both against transformers and against exact probabilities."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ops.draws import draws, first_draws, grow_tree
from quire.core.dry import DryBreaker
from quire.core.params import SamplingParams
from quire.core.watermark import Watermark
from quire.ops.native.sampler import NativeSampler
from quire.ops.opset import Masks
from quire.ops.reference.filters import Survivors, weights
from quire.ops.reference.sampler import SamplerRow, TorchSampler, edit
from quire.ops.row_params import DryParams, Filter, MirostatParams, RowParams
from quire.ops.sampled_row import BROKEN, CANDIDATES
from quire.runtime.sampling import row_params
from trials import LENGTH

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


def survivors(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The ids that the row's filters leave, by the specification."""
    left = Survivors(logits)
    left.filter(params, xtc_chance=0.0)
    return left.ids


def assert_same(native, spec) -> None:
    """Tokens, ids and ranks equal; logprobs equal but for the last bits of log()."""
    (native,), (spec,) = draws(native), draws(spec)
    assert native.token == spec.token
    assert [(token, rank) for token, _, rank in native.logprobs] == [(token, rank) for token, _, rank in spec.logprobs]
    assert [p for _, p, _ in native.logprobs] == pytest.approx([p for _, p, _ in spec.logprobs], rel=1e-12, abs=1e-12)


# -- native = torch --------------------------------------------------------------------------------------------------

VOCAB = 24
token_ids = st.integers(0, VOCAB - 1)
logit = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 2.5]),  # ties
    st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38]),
)
params_strategy = st.builds(
    RowParams,
    seed=st.integers(-(2**63), 2**64 - 1),
    sample=st.integers(0, 127),
    temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.5]),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=3).map(lambda d: tuple(d.items())),
    allowed=st.none() | st.lists(token_ids, min_size=1, max_size=6, unique=True).map(tuple),
    banned=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_ids=st.lists(st.integers(0, VOCAB + 3), max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    num_logprobs=st.integers(-1, 5),
    logprob_ids=st.lists(token_ids, max_size=3, unique=True).map(tuple),
    num_candidates=st.sampled_from([0, 0, 0, 4, VOCAB + 1]),
    watermark=st.sampled_from([None, None, Watermark(), Watermark(gamma=0.9, delta=30.0, key=2**64 - 1)]),
    no_repeat_ngram=st.sampled_from([0, 0, 0, 1, 2, 3]),
    dry=st.sampled_from([None, None, DryParams(0.8, 1.75, 1), DryParams(100.0, 100.0, 0, 4, (DryBreaker([1], [2]),))]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.1, 1.0, 3.0]),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.5, 100.0]),
    dynatemp_exponent=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    mirostat=st.sampled_from(
        [None, None, None, MirostatParams(1, 0.5, 1.0), MirostatParams(2), MirostatParams(2, 9.0, 9.0)]
    ),
    order=st.just(tuple(Filter)) | st.permutations(tuple(Filter)).map(tuple),
)


@pytest.mark.trial
@settings(max_examples=120 * LENGTH, deadline=None)
@given(
    params=params_strategy,
    tokens=st.lists(token_ids, max_size=6),
    num_prompt=st.integers(0, 6),
    lines=st.lists(st.lists(logit, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=3),
)
def test_native_draws_what_the_specification_draws(params, tokens, num_prompt, lines):
    native, spec = NativeSampler(1, VOCAB), TorchSampler(1, VOCAB)
    for sampler in (native, spec):
        sampler.admit(0, params, tokens, min(num_prompt, len(tokens)))
    for line in np.array(lines, dtype=np.float32):  # tokens drawn earlier weigh in later
        assert_same(native.draw(line[None], [0])[0], spec.draw(torch.from_numpy(line)[None], [0])[0])


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("scale", [0.05, 3.0])  # nearly uniform: most of the vocabulary survives
def test_native_equals_specification_on_a_large_vocabulary(name, scale):
    vocab, rows = 49152, 2
    logits = bell(vocab, rows, scale=scale)
    native, spec = NativeSampler(rows, vocab), TorchSampler(rows, vocab)
    for row in range(rows):
        params = RowParams(seed=row, sample=row, num_logprobs=3, **FILTERS[name])
        native.admit(row, params, [1, 2, 3], 3)
        spec.admit(row, params, [1, 2, 3], 3)
    drawn = zip(native.draw(logits, range(rows)), spec.draw(torch.from_numpy(logits), range(rows)), strict=True)
    for ours, theirs in drawn:
        assert_same(ours, theirs)


def test_prompt_logprobs_are_a_log_softmax_with_ranks():
    logits = bell(1000, 5)
    logits[0, :3] = math.nan
    targets = [3, 0, 999, 17, 5]
    native = NativeSampler(1, 1000).logprobs(logits, targets, 4)
    spec = TorchSampler(1, 1000).logprobs(torch.from_numpy(logits), targets, 4)
    clean = torch.from_numpy(logits).nan_to_num(nan=-math.inf)
    exact = clean.double().log_softmax(-1)
    for line, target, ours, theirs in zip(range(5), targets, native, spec, strict=True):
        assert [(t, r) for t, _, r in ours] == [(t, r) for t, _, r in theirs]
        best = exact[line].topk(4).indices.tolist()
        assert [t for t, _, _ in ours] == [target, *best]
        assert [p for _, p, _ in ours] == pytest.approx(exact[line][[target, *best]].tolist(), abs=1e-9)
        assert ours[0][2] == 1 + int((clean[line] > clean[line][target]).sum())
        assert [r for _, _, r in ours[1:]] == [1, 2, 3, 4]


def test_weights_are_softmax():
    distance = torch.linspace(-32, 0, 100001, dtype=torch.float64)
    assert ((weights(distance) - 2.0**44 * distance.exp()).abs() <= 0.5 + 1e-11 * 2.0**44 * distance.exp()).all()


# -- the distribution is the one asked for ---------------------------------------------------------------------------


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


# -- transformers as the oracle of the surviving sets ----------------------------------------------------------------


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


# -- masks -----------------------------------------------------------------------------------------------------------


def test_a_ban_holds_only_after_its_beginning():
    logits = [5.0, 4.0, 3.0, 2.0]
    banned = replace(GREEDY, banned=((1, 2, 0), (3,)))
    assert draw_one(logits, banned, [1, 2]).token == 1
    assert draw_one(logits, banned, [2, 1]).token == 0
    assert draw_one(logits, banned, [2]).token == 0
    assert draw_one([1.0, 0.0, 0.0, 9.0], banned).token == 0


def test_stop_tokens_wait_for_min_tokens():
    sampler = NativeSampler(1, 3)
    sampler.admit(0, replace(GREEDY, stop_ids=(0, 99), min_tokens=2), [1, 1, 1], 3)
    line = np.array([[9.0, 1.0, 0.0]], dtype=np.float32)
    assert [sampler.draw(line, [0])[0].tokens for _ in range(3)] == [[1], [1], [0]]


def test_bias_and_allowed():
    assert draw_one([1.0, 2.0, 3.0], replace(GREEDY, logit_bias=((0, 5.0),))).token == 0
    assert draw_one([1.0, 2.0, 3.0], replace(GREEDY, allowed=(0, 1))).token == 1
    assert draw_one([1.0, 2.0, 3.0], replace(GREEDY, allowed=(1,), logit_bias=((0, 100.0),))).token == 1


@pytest.mark.parametrize("kind", [NativeSampler, TorchSampler])
def test_when_all_is_masked_the_best_raw_logit_of_the_allowed_is_taken(kind):
    params = replace(PLAIN, allowed=(0, 1), banned=((0,), (1,)), logit_bias=((0, 50.0),))
    assert draw_one([1.0, 2.0, 3.0], params, kind=kind).token == 1
    assert draw_one([1.0, 2.0, 3.0], replace(params, num_candidates=4), kind=kind).logprobs[0][0] == 1


@pytest.mark.parametrize("kind", [NativeSampler, TorchSampler])
def test_logits_that_are_not_numbers(kind):
    nan, inf = math.nan, math.inf
    assert draw_one([nan, 1.0, nan], PLAIN, kind=kind).token == 1
    assert draw_one([1.0, inf, 3.0], PLAIN, kind=kind).token == 1
    assert draw_one([nan, -inf, nan], PLAIN, kind=kind).token == BROKEN
    assert draw_one([nan, 1.0, nan], replace(PLAIN, allowed=(0,)), kind=kind).token == BROKEN
    assert {draw_one([inf, inf, 0.0], replace(PLAIN, seed=s), kind=kind).token for s in range(20)} == {0, 1}


def test_a_broken_row_does_not_disturb_the_others():
    sampler = NativeSampler(2, 3)
    for row in range(2):
        sampler.admit(row, GREEDY, [0], 1)
    logits = np.array([[math.nan] * 3, [0.0, 2.0, 1.0]], dtype=np.float32)
    assert [draw.token for draw in first_draws(sampler.draw(logits, [0, 1]))] == [BROKEN, 1]


def test_ties_go_to_the_lower_id():
    assert draw_one([1.0, 3.0, 3.0, 3.0], GREEDY).token == 1
    drawn = {draw_one([1.0, 3.0, 3.0, 3.0], replace(PLAIN, top_k=2, seed=seed)).token for seed in range(50)}
    assert drawn == {1, 2}
    assert [rank for _, _, rank in draw_one([3.0, 1.0, 3.0], replace(GREEDY, num_logprobs=3)).logprobs] == [1, 1, 1, 3]


def test_candidates_are_the_best_continuations_and_nothing_is_appended():
    logits = bell(40)[0]
    params = replace(PLAIN, temperature=0.5, top_k=1, num_candidates=6, banned=((int(logits.argmax()),),))
    sampler = NativeSampler(1, 40)
    sampler.admit(0, params, [1], 1)
    first, second = (first_draws(sampler.draw(logits[None], [0]))[0] for _ in range(2))
    assert first == second
    assert first.token == CANDIDATES
    logprobs = (torch.from_numpy(logits).double() / 0.5).log_softmax(-1)  # as if nothing were masked
    logprobs[logits.argmax()] = -math.inf
    best = logprobs.topk(6)
    assert [t for t, _, _ in first.logprobs] == best.indices.tolist()
    assert [p for _, p, _ in first.logprobs] == pytest.approx(best.values.tolist(), abs=1e-9)


# -- masks of a step -------------------------------------------------------------------------------------------------


def masks_of(allowed: dict[int, list[int]], vocab: int) -> Masks:
    """By line. Bits beyond the vocabulary are set: they mean nothing."""
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), np.uint8)
    bits[:, vocab:] = 1
    for i, tokens in enumerate(allowed.values()):
        bits[i, tokens] = 1
    return Masks(list(allowed), np.packbits(bits, axis=1, bitorder="little").view(np.uint32))


@pytest.mark.parametrize("vocab", [7, 64, 5003])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, *FILTERS.values()], ids=["greedy", *FILTERS])
def test_masked_lines_draw_what_their_masks_permit_and_others_do_not_care(vocab, params):
    logits = bell(vocab, 5)
    order = np.argsort(logits, axis=1)
    masks = masks_of({1: order[1, : vocab // 2].tolist(), 3: [int(order[3, 0])], 4: order[4, -3:].tolist()}, vocab)
    native, spec, plain = NativeSampler(5, vocab, 2), TorchSampler(5, vocab), NativeSampler(5, vocab)
    asked = replace(PLAIN, **params, num_logprobs=2, repetition_penalty=1.2, logit_bias=((2, 1.0),))
    for sampler in (native, spec, plain):
        for row in range(5):
            sampler.admit(row, replace(asked, seed=row), [1, 2, 3], 2)
    actual = native.draw(logits, range(5), masks)
    for ours, theirs in zip(actual, spec.draw(torch.from_numpy(logits), range(5), masks), strict=True):
        assert_same(ours, theirs)
    actual, unmasked = first_draws(actual), first_draws(plain.draw(logits, range(5)))
    assert actual[1].token in order[1, : vocab // 2] and actual[3].token == order[3, 0]
    assert [actual[row] for row in (0, 2)] == [unmasked[row] for row in (0, 2)]
    assert actual[3].logprobs[1:] == unmasked[3].logprobs[1:]  # of the raw logits
    assert actual[3].logprobs[0][2] == vocab  # the rank of the least likely token


@pytest.mark.parametrize("kind", [NativeSampler, TorchSampler])
def test_a_mask_outweighs_all_other_wishes(kind):
    """What a language leaves is drawn, if nothing else is there, though it is banned, biased or a stop token."""
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    wishes = replace(PLAIN, banned=((3,),), stop_ids=(3,), min_tokens=9, logit_bias=((3, -100.0),))

    def draw(allowed: list[int], params: RowParams):
        sampler = kind(1, 4)
        sampler.admit(0, params, [1], 1)
        lines = logits if kind is NativeSampler else torch.from_numpy(logits)
        return first_draws(sampler.draw(lines, [0], masks_of({0: allowed}, 4)))[0]

    assert draw([3], wishes).token == 3
    assert draw([2, 3], wishes).token == 2
    assert draw([], wishes).token == BROKEN
    assert draw([3], replace(PLAIN, allowed=(0, 1))).token == BROKEN
    candidates = draw([1, 3], replace(PLAIN, num_candidates=4))
    assert candidates.token == CANDIDATES and [token for token, _, _ in candidates.logprobs] == [1, 3]


def test_masks_of_another_shape_are_refused():
    sampler = NativeSampler(2, 40)
    sampler.admit(0, PLAIN, [1], 1)
    for masks in (
        Masks([0], np.zeros((1, 1), np.uint32)),
        Masks([0, 1], np.zeros((1, 2), np.uint32)),
        Masks([1], np.zeros((1, 2), np.uint32)),
    ):
        with pytest.raises((ValueError, IndexError)):
            sampler.draw(bell(40), [0], masks)


# -- the same request gives the same tokens --------------------------------------------------------------------------

REQUEST = RowParams(seed=11, sample=2, temperature=1.5, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1)


def continue_request(sampler, row: int, logits: np.ndarray, others: list[int]) -> list[int]:
    """Draw a token for each line, other rows drawing beside it."""
    tokens = []
    for line in logits:
        rows = [*others, row]
        tokens += sampler.draw(np.tile(line, (len(rows), 1)), rows)[-1].tokens
    return tokens


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_tokens_do_not_depend_on_row_batch_threads_or_neighbours(threads):
    logits = bell(500, 12)
    alone = NativeSampler(1, 500, 1)
    alone.admit(0, REQUEST, [1, 2, 3], 3)
    expected = continue_request(alone, 0, logits, [])

    crowd = NativeSampler(9, 500, threads)
    for row in range(8):
        crowd.admit(row, replace(REQUEST, seed=row, top_k=row), [row] * row, row)
    crowd.admit(8, REQUEST, [1, 2, 3], 3)
    assert continue_request(crowd, 8, logits, list(range(8))) == expected


def test_a_preempted_request_goes_on_where_it_was():
    logits = bell(500, 12)
    sampler = NativeSampler(2, 500)
    sampler.admit(0, REQUEST, [1, 2, 3], 3)
    expected = continue_request(sampler, 0, logits, [])
    sampler.retire(0)
    sampler.admit(0, PLAIN, [4], 1)
    sampler.admit(1, REQUEST, [1, 2, 3, *expected[:5]], 3)
    assert continue_request(sampler, 1, logits[5:], []) == expected[5:]


def test_seed_sample_and_position_each_matter():
    logits = bell(5000)[0]
    base = draw_one(logits, REQUEST, [1]).token
    assert draw_one(logits, replace(REQUEST, seed=12), [1]).token != base
    assert draw_one(logits, replace(REQUEST, sample=3), [1]).token != base
    assert draw_one(logits, REQUEST, [1, 1]).token != base


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NativeSampler, TorchSampler])
@pytest.mark.parametrize("wrong", [{"allowed": (4,)}, {"logit_bias": ((-1, 1.0),)}, {"banned": ((0, 9),)}])
def test_ids_outside_the_vocabulary_are_refused(kind, wrong):
    with pytest.raises(ValueError, match="the vocabulary has 4"):
        kind(1, 4).admit(0, replace(PLAIN, **wrong), [], 0)


def test_misuse_is_refused():
    sampler = NativeSampler(2, 4)
    sampler.admit(0, PLAIN, [], 0)
    line = np.zeros((1, 4), dtype=np.float32)
    with pytest.raises(ValueError, match="row 0 is held"):
        sampler.admit(0, PLAIN, [], 0)
    with pytest.raises(ValueError, match="row 1 is not admitted"):
        sampler.draw(line, [1])
    with pytest.raises(ValueError, match="twice"):
        sampler.draw(np.zeros((2, 4), dtype=np.float32), [0, 0])
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        sampler.draw(np.zeros((1, 5), dtype=np.float32), [0])
    with pytest.raises(TypeError):
        sampler.draw(line.astype(np.float64), [0])


# -- from the user's parameters --------------------------------------------------------------------------------------


def asked(**params) -> RowParams:
    return row_params(SamplingParams(seed=5, **params), 3, [2])


def test_row_params_of_a_request():
    params = asked(top_k=-1, logit_bias={3: 1.5}, allowed_token_ids=[1, 3], bad_token_ids=[[1, 2]], min_tokens=1)
    assert params == RowParams(
        seed=5, sample=3, logit_bias=((3, 1.5),), allowed=(1, 3), banned=((1, 2),), stop_ids=(2,), min_tokens=1
    )


def test_samplers_that_are_not_named_have_no_effect():
    named = asked(samplers=["temperature", "top_k"], top_k=3, temperature=0.5, min_p=0.2, dry_multiplier=1.0)
    assert named.filters == [Filter.TEMPERATURE, Filter.TOP_K] and named.dry is None
    assert asked(samplers=[], temperature=0.0, repetition_penalty=2.0, xtc_probability=1.0).filters == []
    assert not asked(samplers=[], temperature=0.0).is_greedy
    assert asked(xtc_probability=1.0, xtc_threshold=0.6, top_n_sigma=-1.0).filters == []


def test_mirostat_replaces_the_filters_and_keeps_penalties():
    params = asked(mirostat=2, top_k=3, top_p=0.5, xtc_probability=1.0, dynatemp_range=1.0, temperature=0.7,
                   dry_multiplier=1.0, repetition_penalty=1.2, samplers=["penalties", "dry", "min_p"])  # fmt: skip
    assert params.filters == [Filter.TEMPERATURE] and params.mirostat == MirostatParams(2)
    assert params.dry is not None and params.repetition_penalty == 1.2 and params.dynatemp_range == 0.0


def test_completions_that_compete_need_logprobs():
    assert asked().num_logprobs == -1
    assert asked(n=2, best_of=2).num_logprobs == -1
    assert asked(best_of=2).num_logprobs == 0
    assert asked(logprobs=4, best_of=2).num_logprobs == 4
    beams = asked(beam_width=3)
    assert (beams.num_logprobs, beams.num_candidates) == (0, 6)


# -- drafts ----------------------------------------------------------------------------------------------------------

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

"""The native sampler against its specification in torch; the same request gives the same tokens in any company."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.draws import first_draws
from ops.one_sampler import FILTERS, GREEDY, PLAIN, assert_same, bell, draw_one
from quire.core.dry import DryBreaker
from quire.core.watermark import Watermark
from quire.ops.native.sampler import NativeSampler
from quire.ops.reference.filters import weights
from quire.ops.reference.sampler import TorchSampler
from quire.ops.row_params import DryParams, Filter, MirostatParams, RowParams
from quire.ops.sampled_row import CANDIDATES
from trials import rounds

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
@settings(max_examples=rounds(120), deadline=None)
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

"""Tokens that a sampler must not draw: bans, stop tokens, masks of a step, and logits that are not numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.draws import first_draws
from ops.one_sampler import FILTERS, GREEDY, PLAIN, assert_same, bell, draw_one
from quire.ops.native.sampler import NativeSampler
from quire.ops.opset import Masks
from quire.ops.reference.sampler import TorchSampler
from quire.ops.row_params import RowParams
from quire.ops.sampled_row import BROKEN, CANDIDATES


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

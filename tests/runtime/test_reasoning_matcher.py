"""Free reasoning and then a grammar, token by token."""

import ctypes
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from quire.core.thinking import Thinking
from quire.runtime.reasoning_matcher import ReasoningMatcher

BEGIN, END, CHANNEL, FINAL, MESSAGE, VOCAB = 40, 41, 50, 51, 52, 64
ANSWER = [1, 2, 3, 4, 5]
ALL = {*range(VOCAB)}


class OneAnswer:
    """A grammar of one text: 1 2 3 4 5."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def error(self) -> str:
        return "" if self.taken == ANSWER[: len(self.taken)] else "not the answer"

    def write_mask(self, address: int, num_bytes: int) -> bool:
        assert not self.error
        ctypes.memset(address, 0, num_bytes)
        if (place := len(self.taken)) < len(ANSWER):
            ctypes.memset(address + ANSWER[place] // 8, 1 << ANSWER[place] % 8, 1)
        return True

    def advance(self, tokens: Sequence[int]) -> bool:
        self.taken += tokens
        return not self.error

    def count_valid(self, tokens: Sequence[int]) -> int:
        rest = ANSWER[len(self.taken) :]
        pairs = enumerate(zip(tokens, rest, strict=False))
        return next((count for count, (token, wanted) in pairs if token != wanted), len(tokens))

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.taken), "the answer takes back its own tokens"
        del self.taken[-count:]


def new(begun: bool = True, ends: tuple[int, ...] = (END,), tokens: int | None = None) -> ReasoningMatcher:
    return ReasoningMatcher(Thinking(BEGIN, ends, begun, tokens), OneAnswer())


def allowed(matcher: ReasoningMatcher) -> set[int]:
    bits = np.zeros(VOCAB // 32, np.uint32)
    assert matcher.write_mask(bits.ctypes.data, bits.nbytes)
    return {token for token in range(VOCAB) if bits[token // 32] >> (token % 32) & 1}


def test_any_token_follows_until_the_end_and_then_the_grammar_holds() -> None:
    matcher = new()
    for token in (1, 2, 7, BEGIN, 3):
        assert allowed(matcher) == ALL
        matcher.advance([token])
    matcher.advance([END])
    for token in ANSWER:
        assert allowed(matcher) == {token}
        assert matcher.advance([token])
    assert not matcher.error
    matcher.advance([END])
    assert matcher.error, "the end marker has no meaning in the answer"


def test_where_reasoning_has_not_begun_it_begins_at_once_or_the_answer_does() -> None:
    matcher = new(begun=False)
    assert allowed(matcher) == {BEGIN, 1}
    matcher.advance([1])
    assert allowed(matcher) == {2}, "not in the middle of the answer"
    matcher.rollback(1)
    assert allowed(matcher) == {BEGIN, 1}
    matcher.advance([BEGIN])
    assert allowed(matcher) == ALL
    matcher.advance([7, END])
    assert allowed(matcher) == {1}, "it begins once"


def test_an_end_of_several_tokens_is_one_that_comes_complete() -> None:
    ends = (CHANNEL, FINAL, MESSAGE)
    matcher = ReasoningMatcher(Thinking(CHANNEL, ends, False), OneAnswer())
    assert allowed(matcher) == {CHANNEL, 1}
    matcher.advance([CHANNEL, 7, MESSAGE, FINAL, MESSAGE, CHANNEL, CHANNEL])
    assert allowed(matcher) == ALL
    matcher.advance([FINAL])
    assert allowed(matcher) == {MESSAGE}, "what was begun is completed, so that nothing stands in between"
    matcher.advance([MESSAGE])
    assert allowed(matcher) == {1}
    short = ReasoningMatcher(Thinking(CHANNEL, ends, False), OneAnswer())
    short.advance([CHANNEL, FINAL, MESSAGE])
    assert allowed(short) == {1}, "without any reasoning: its first token is the end's, too"


def test_a_budget_ends_reasoning_and_the_grammar_follows() -> None:
    matcher = new(tokens=2)
    matcher.advance([7, 7])
    assert allowed(matcher) == {END}
    matcher.advance([END])
    assert allowed(matcher) == {1}
    assert new(tokens=2).count_valid([7, 7, 7, 7]) == 2
    assert new(tokens=2).count_valid([7, 7, END, 1, 2, 9]) == 5
    several = new(ends=(CHANNEL, FINAL, MESSAGE), tokens=1)
    several.advance([7])
    for token in (CHANNEL, FINAL, MESSAGE, 1):
        assert allowed(several) == {token}
        several.advance([token])


@pytest.mark.parametrize(
    ("drafts", "begun", "valid"),
    [
        ([7, 8, 9], True, 3),
        ([7, END], True, 2),
        ([7, END, 1, 2], True, 4),
        ([7, END, 1, 3], True, 3),
        ([7, END, 7], True, 2),
        ([1, 2, 9], False, 2),
        ([BEGIN, 9, END, 1, 9], False, 4),
        ([9], False, 0),
        ([1, BEGIN], False, 1),
    ],
)
def test_drafts_are_valid_across_the_end_of_reasoning(drafts: list[int], begun: bool, valid: int) -> None:
    matcher = new(begun)
    before = allowed(matcher)
    assert matcher.count_valid(drafts) == valid
    assert allowed(matcher) == before and not matcher.error, "nothing is consumed"


@pytest.mark.parametrize("tokens", [[7, 8, END, *ANSWER], [BEGIN, 7, END, *ANSWER], ANSWER])
def test_what_is_taken_back_leaves_the_masks_as_they_were(tokens: list[int]) -> None:
    chance, begun = random.Random(1), tokens[0] == 7
    matcher, masks = new(begun), []
    for token in tokens:
        masks.append(allowed(matcher))
        matcher.advance([token])
    masks.append(allowed(matcher))
    places = [len(tokens), *(chance.randrange(len(masks)) for _ in range(60))]
    for before, place in pairwise(places):
        matcher.rollback(before - min(before, place))
        matcher.advance(tokens[min(before, place) : place])
        assert allowed(matcher) == masks[place]
    fresh = new(begun)
    fresh.advance(tokens)
    assert allowed(fresh) == masks[-1], "all at once"

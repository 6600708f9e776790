"""A budget of reasoning, token by token."""

import numpy as np

from quire.core.thinking import Thinking
from quire.runtime.thinking_matcher import ThinkingMatcher

BEGIN, END, VOCAB = 40, 41, 64


def allowed(matcher: ThinkingMatcher) -> set[int]:
    bits = np.zeros(VOCAB // 32, np.uint32)
    assert matcher.write_mask(bits.ctypes.data, bits.nbytes)
    return {token for token in range(VOCAB) if bits[token // 32] >> (token % 32) & 1}


def new(tokens: int, begun: bool = True) -> ThinkingMatcher:
    return ThinkingMatcher(Thinking(BEGIN, (END,), begun, tokens))


def test_only_the_end_follows_a_spent_budget_and_anything_the_end() -> None:
    matcher = new(2)
    for _ in range(2):
        assert allowed(matcher) == {*range(VOCAB)}
        matcher.advance([7])
    assert allowed(matcher) == {END}
    matcher.advance([END])
    assert allowed(matcher) == {*range(VOCAB)}


def test_an_answer_without_reasoning_is_not_limited() -> None:
    matcher = new(2, begun=False)
    matcher.advance([7] * 50)
    assert allowed(matcher) == {*range(VOCAB)}


def test_reasoning_that_begins_later_is_limited_and_goes_on_with_what_is_left() -> None:
    matcher = new(3, begun=False)
    matcher.advance([7, BEGIN, 7, 7, END, 7, BEGIN])
    assert allowed(matcher) == {END}, "its tokens and the first end are three"
    fresh = new(4, begun=False)
    fresh.advance([BEGIN, 7, END, BEGIN])
    assert allowed(fresh) == {*range(VOCAB)}
    fresh.advance([BEGIN, 7])
    assert allowed(fresh) == {END}, "a second beginning counts like any token"


def test_no_reasoning_at_all() -> None:
    assert allowed(new(0)) == {END}
    matcher = new(0, begun=False)
    matcher.advance([BEGIN])
    assert allowed(matcher) == {END}


def test_drafts_are_valid_up_to_the_budget_and_are_taken_back() -> None:
    matcher = new(3)
    assert matcher.count_valid([7, 7, 7, 7]) == 3 and matcher.count_valid([7, 7, 7, END, 7]) == 5
    matcher.advance([7, 7, 7])
    assert allowed(matcher) == {END}
    matcher.rollback(2)
    assert allowed(matcher) == {*range(VOCAB)} and matcher.count_valid([7, 7, 7]) == 2
    matcher.rollback(0)
    matcher.rollback(1)
    assert matcher.count_valid([7, 7, 7, 7]) == 3

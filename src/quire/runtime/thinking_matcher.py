"""Follows reasoning, and ends it when its budget is used up, as a matcher that lets everything else follow."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.thinking import Thinking


class _State(NamedTuple):
    inside: bool  # in reasoning
    num_tokens: int = 0  # of it, so far
    num_matched: int = 0  # of the tokens that end it: the last ones are the first of these


class ThinkingMatcher:
    """A `Matcher` of runtime/matcher.py. Reasoning that begins again goes on with what is left."""

    error = ""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._states = [_State(thinking.begun)]  # before each token

    @property
    def inside(self) -> bool:
        """Whether the next token is reasoning's."""
        return self._states[-1].inside

    def write_mask(self, address: int, num_bytes: int) -> bool:
        forced = self._forced(self._states[-1])
        ctypes.memset(address, 0xFF if forced is None else 0, num_bytes)
        if forced is not None:
            byte, bit = divmod(forced, 8)
            ctypes.memset(address + byte, 1 << bit, 1)
        return True

    def advance(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            self._states.append(self._after(self._states[-1], token))
        return True

    def count_valid(self, tokens: Sequence[int]) -> int:
        state = self._states[-1]
        for count, token in enumerate(tokens):
            if self._forced(state) not in (None, token):
                return count
            state = self._after(state, token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        del self._states[len(self._states) - count :]

    def _forced(self, state: _State) -> int | None:
        """The only token that may follow. An end of several tokens that has come to its last one is completed."""
        ends, budget = self._thinking.end_ids, self._thinking.tokens
        if not state.inside:
            return None
        is_spent = budget is not None and state.num_tokens >= budget
        return ends[state.num_matched] if is_spent or 0 < state.num_matched == len(ends) - 1 else None

    def _after(self, state: _State, token: int) -> _State:
        ends = self._thinking.end_ids
        if not state.inside:
            inside = token == self._thinking.begin_id
            return _State(inside, state.num_tokens, int(inside and len(ends) > 1 and token == ends[0]))
        matched = state.num_matched + 1 if token == ends[state.num_matched] else int(token == ends[0])
        if matched == len(ends):
            return _State(False, state.num_tokens + 1)
        return _State(True, state.num_tokens + 1, matched)

"""Ends reasoning that has used up its budget, as a matcher that lets everything else follow."""

import ctypes
from collections.abc import Sequence

from quire.core.thinking import ThinkingBudget


class ThinkingMatcher:
    """A `Matcher` of runtime/structured_output.py. Reasoning that begins again goes on with what is left."""

    error = ""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._states = [(budget.begun, 0)]  # before each token: whether it is in reasoning, and tokens of it so far

    def write_mask(self, address: int, num_bytes: int) -> bool:
        spent = self._is_spent(self._states[-1])
        ctypes.memset(address, 0 if spent else 0xFF, num_bytes)
        if spent:
            byte, bit = divmod(self._budget.end_id, 8)
            ctypes.memset(address + byte, 1 << bit, 1)
        return True

    def advance(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            self._states.append(self._after(self._states[-1], token))
        return True

    def count_valid(self, tokens: Sequence[int]) -> int:
        state = self._states[-1]
        for count, token in enumerate(tokens):
            if self._is_spent(state) and token != self._budget.end_id:
                return count
            state = self._after(state, token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        del self._states[len(self._states) - count :]

    def _is_spent(self, state: tuple[bool, int]) -> bool:
        inside, count = state
        return inside and count >= self._budget.tokens

    def _after(self, state: tuple[bool, int], token: int) -> tuple[bool, int]:
        inside, count = state
        if inside:
            return token != self._budget.end_id, count + 1
        return token == self._budget.begin_id, count

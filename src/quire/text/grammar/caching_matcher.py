"""A matcher that asks llguidance for a mask only in states without a cached one."""

import ctypes
from collections.abc import Sequence

from quire.text.grammar.mask_cache import RegexState, RegexStates
from quire.text.grammar.matcher import GrammarMatcher


class CachingMatcher:
    """Follows the automaton of a regex beside the matcher. Tokens of a cached mask are allowed without asking, so the
    matcher consumes them only before it has to answer."""

    def __init__(self, matcher: GrammarMatcher, states: RegexStates) -> None:
        self._matcher, self._states = matcher, states
        self._state: RegexState | None = states.start  # None: not known
        self._states_before: list[RegexState | None] = []  # each token
        self._pending: list[int] = []  # the last tokens, which the matcher has not consumed yet

    @property
    def error(self) -> str:
        return self._matcher.error

    @property
    def ended(self) -> bool:
        self._consume_pending()
        return self._matcher.ended

    def mask(self) -> bytes:
        mask = self._cached_mask()
        if mask is None:
            self._consume_pending()
            mask = self._matcher.mask()
            if self._state is not None and not self._matcher.error:
                self._states.cache_mask(self._state, mask)
        return mask

    def write_mask(self, address: int, num_bytes: int) -> bool:
        mask = self._cached_mask()
        if mask is not None:
            ctypes.memmove(address, mask, num_bytes)
            return True
        self._consume_pending()
        written = self._matcher.write_mask(address, num_bytes)
        if written and self._state is not None:
            self._states.cache_mask(self._state, ctypes.string_at(address, num_bytes))
        return written

    def advance(self, tokens: Sequence[int]) -> bool:
        allowed = True
        for token in tokens:
            state = self._state
            self._states_before.append(state)
            self._state = None if state is None else self._states.after(state, token)
            allowed &= state is not None and state.allows(token) and self._state is not None
        if allowed:
            self._pending += tokens
            return True
        self._consume_pending()
        done = self._matcher.advance(tokens)
        if not done:
            self._state = None
        return done

    def count_valid(self, tokens: Sequence[int]) -> int:
        self._consume_pending()
        return self._matcher.count_valid(tokens)

    def rollback(self, count: int) -> None:
        if not count:
            return
        self._state = self._states_before[-count]
        del self._states_before[-count:]
        num_consumed = max(0, count - len(self._pending))
        del self._pending[max(0, len(self._pending) - count) :]
        if num_consumed:
            self._matcher.rollback(num_consumed)

    def _cached_mask(self) -> bytes | None:
        return None if self._state is None else self._states.cached_mask(self._state)

    def _consume_pending(self) -> None:
        if self._pending:
            self._matcher.advance(self._pending)
            self._pending = []

"""A matcher that asks llguidance for a mask only where none is cached."""

import ctypes
from collections.abc import Sequence

from quire.text.grammar.mask_cache import RegexState, RegexStates
from quire.text.grammar.matcher import GrammarMatcher


class CachingMatcher:
    """Asks a matcher for a mask only in states where nobody has been. What is in a state's mask may be taken in, so the
    matcher is told of tokens only before it is asked."""

    def __init__(self, matcher: "GrammarMatcher", states: RegexStates) -> None:
        self._matcher, self._states = matcher, states
        self._state: RegexState | None = states.start
        self._before: list[RegexState | None] = []  # every token
        self._owed: list[int] = []  # the last tokens: those that the matcher has not been told of

    @property
    def error(self) -> str:
        return self._matcher.error

    @property
    def ended(self) -> bool:
        self._tell()
        return self._matcher.ended

    def mask(self) -> bytes:
        known = self._known()
        if known is None:
            self._tell()
            known = self._matcher.mask()
            if self._state is not None and not self._matcher.error:
                self._states.keep(self._state, known)
        return known

    def write_mask(self, address: int, num_bytes: int) -> bool:
        known = self._known()
        if known is not None:
            ctypes.memmove(address, known, num_bytes)
            return True
        self._tell()
        written = self._matcher.write_mask(address, num_bytes)
        if written and self._state is not None:
            self._states.keep(self._state, ctypes.string_at(address, num_bytes))
        return written

    def advance(self, tokens: Sequence[int]) -> bool:
        permitted = True
        for token in tokens:
            state = self._state
            self._before.append(state)
            self._state = None if state is None else self._states.after(state, token)
            permitted &= state is not None and state.permits(token) and self._state is not None
        if permitted:
            self._owed += tokens
            return True
        self._tell()
        done = self._matcher.advance(tokens)
        if not done:
            self._state = None
        return done

    def count_valid(self, tokens: Sequence[int]) -> int:
        self._tell()
        return self._matcher.count_valid(tokens)

    def rollback(self, count: int) -> None:
        if not count:
            return
        self._state = self._before[-count]
        del self._before[-count:]
        told = max(0, count - len(self._owed))
        del self._owed[max(0, len(self._owed) - count) :]
        if told:
            self._matcher.rollback(told)

    def _known(self) -> bytes | None:
        return None if self._state is None else self._states.mask(self._state)

    def _tell(self) -> None:
        if self._owed:
            self._matcher.advance(self._owed)
            self._owed = []

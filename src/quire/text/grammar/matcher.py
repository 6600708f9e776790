"""A compiled grammar, and where one sequence stands in it."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.text.grammar.mask_cache import RegexStates

if TYPE_CHECKING:
    from llguidance import LLMatcher

ALLOWANCE = 0.25  # CPU seconds that following one answer may take at once, and
ALLOWANCE_PER_TOKEN = 0.004  # for every token of it; ordinary schemas need a hundredth of that
SOON = 0.05  # seconds of compiling that the loop can wait for


class CompiledGrammar:
    """A compiled language. What its matchers find out about it they share; its limits hold for all that together."""

    __slots__ = ("__weakref__", "_start", "num_matchers", "num_words", "seconds", "states")

    def __init__(self, start: "LLMatcher", num_words: int, seconds: float, states: RegexStates | None) -> None:
        self._start = start
        self.states = states  # if they can be told apart
        self.num_words = num_words  # of 32 bits, of a mask
        self.seconds = seconds  # that compiling it took, and would take again
        self.num_matchers = 0  # that were ever made

    def matcher(self) -> "LLMatcher":
        self.num_matchers += 1
        return self._start.deep_copy()


class GrammarMatcher:
    """Where an answer stands in its language."""

    def __init__(self, grammar: CompiledGrammar, renew: Callable[[], CompiledGrammar]) -> None:
        """`renew` compiles the language again: in one that others have used much, a limit may be reached by what they
        found out. What an answer may be does not depend on them."""
        self._grammar, self._renew = grammar, renew
        self._matcher = grammar.matcher()
        self._tokens: list[int] = []
        self._spent = 0.0
        self._spent_before: list[float] = []  # each of the tokens: what is forgotten is not charged for

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        if self._matcher.is_error():
            return self._matcher.get_error().split("\n")[0]
        if self._spent > ALLOWANCE + ALLOWANCE_PER_TOKEN * len(self._tokens):
            return f"following it took {self._spent:.2f} s for {len(self._tokens)} tokens; ask for something simpler"
        return ""

    @property
    def ended(self) -> bool:
        """Nothing more can follow."""
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        """A bit for every token that may follow: token t is bit t % 8 of byte t / 8. Where the answer may end, the
        tokens that end a text are among them; where it must, they are alone. None where there is an `error`."""
        words = (ctypes.c_uint32 * self._grammar.num_words)()
        return bytes(words) if self.write_mask(ctypes.addressof(words), ctypes.sizeof(words)) else bytes(len(words) * 4)

    def write_mask(self, address: int, num_bytes: int) -> bool:
        """The same into memory, which must be as long as it is. False: there is an `error`, and what lies there now
        means nothing."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)  # a third of the time that taking bytes from it takes
        if self._matcher.is_error() and self._begin_anew():
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        self._spent += time.thread_time() - begin
        return not self._matcher.is_error()

    def advance(self, tokens: Sequence[int]) -> bool:
        """Take in what was drawn. False: it is outside the language, and `error` says so from now on."""
        begin = time.thread_time()
        again, ended = self._reopen(), self.ended
        self._tokens += tokens
        self._spent_before += [self._spent] * len(tokens)
        done = self._matcher.consume_tokens([*again, *tokens]) or (not ended and self._begin_anew())
        self._spent += time.thread_time() - begin
        return done

    def count_valid(self, tokens: Sequence[int]) -> int:
        """How many of these, the first first, might be drawn next. Nothing is taken in: for drafts."""
        again = self._reopen()
        count = self._matcher.validate_tokens([*again, *tokens]) - len(again)
        if again:
            self._matcher.consume_tokens(again)
        return count

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens taken in."""
        left = len(self._tokens) - count
        if count:
            self._spent = self._spent_before[left]
        del self._tokens[left:], self._spent_before[left:]
        self._matcher.rollback(count)

    def _reopen(self) -> list[int]:
        """Where nothing can follow, a parser stops and refuses even the token that ends a text. Then it is put back by
        one token, which is returned: it has to be taken in again."""
        if self._matcher.stop_reason() != "NoExtension":
            return []
        self._matcher.rollback(1)
        return self._tokens[-1:]

    def _begin_anew(self) -> bool:
        if self._grammar.num_matchers == 1 or self._grammar.seconds > SOON:
            return False
        self._grammar = self._renew()
        self._spent += self._grammar.seconds
        self._matcher = self._grammar.matcher()
        return self._matcher.consume_tokens(self._tokens)

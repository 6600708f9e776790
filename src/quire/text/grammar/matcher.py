"""A compiled grammar, and where one sequence stands in it."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.text.grammar.mask_cache import RegexStates

if TYPE_CHECKING:
    from llguidance import LLMatcher

# CPU seconds that matching one sequence may take: a fixed part and a part for each token. Ordinary schemas need 1 %.
BASE_CPU_SECONDS = 0.25
CPU_SECONDS_PER_TOKEN = 0.004
MAX_RECOMPILE_SECONDS = 0.05  # the engine's loop can wait this long


class CompiledGrammar:
    """A grammar whose matchers share the lexer states that they discover, and llguidance's limits count all of them
    together."""

    __slots__ = ("__weakref__", "_start", "num_matchers", "num_words", "seconds", "states")

    def __init__(self, start: "LLMatcher", num_words: int, seconds: float, states: RegexStates | None) -> None:
        self._start = start
        self.states = states  # of a regex that has an automaton
        self.num_words = num_words  # of a mask, 32 bits each
        self.seconds = seconds  # of CPU time to compile it
        self.num_matchers = 0  # created so far

    def new_matcher(self) -> "LLMatcher":
        self.num_matchers += 1
        return self._start.deep_copy()


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, grammar: CompiledGrammar, recompile: Callable[[], CompiledGrammar]) -> None:
        """`recompile` compiles the grammar again. A shared grammar may reach a limit because of states that other
        matchers discovered; a fresh copy keeps the output of a sequence independent of them."""
        self._grammar, self._recompile = grammar, recompile
        self._matcher = grammar.new_matcher()
        self._tokens: list[int] = []
        self._cpu_seconds = 0.0
        self._cpu_seconds_before: list[float] = []  # each token: a rollback restores the budget, too

    @property
    def error(self) -> str:
        """Why matching cannot go on; empty while it can."""
        if self._matcher.is_error():
            return self._matcher.get_error().split("\n")[0]
        if self._cpu_seconds > BASE_CPU_SECONDS + CPU_SECONDS_PER_TOKEN * len(self._tokens):
            return f"matching took {self._cpu_seconds:.2f} s of CPU time for {len(self._tokens)} tokens; simplify it"
        return ""

    @property
    def ended(self) -> bool:
        """No token can follow."""
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        """The tokens that may follow: token t is bit t % 8 of byte t / 8. The eos tokens are allowed where the text
        may end, and they alone where it must. All zero if there is an `error`."""
        words = (ctypes.c_uint32 * self._grammar.num_words)()
        return bytes(words) if self.write_mask(ctypes.addressof(words), ctypes.sizeof(words)) else bytes(len(words) * 4)

    def write_mask(self, address: int, num_bytes: int) -> bool:
        """Write the mask to memory of exactly its size. False if there is an `error`: the memory is then undefined."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)  # a third of the time of returning bytes
        if self._matcher.is_error() and self._restart():
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        self._cpu_seconds += time.thread_time() - begin
        return not self._matcher.is_error()

    def advance(self, tokens: Sequence[int]) -> bool:
        """Consume sampled tokens. False if the grammar does not allow them: `error` says so from now on."""
        begin = time.thread_time()
        reopened, ended = self._reopen(), self.ended
        self._tokens += tokens
        self._cpu_seconds_before += [self._cpu_seconds] * len(tokens)
        done = self._matcher.consume_tokens([*reopened, *tokens]) or (not ended and self._restart())
        self._cpu_seconds += time.thread_time() - begin
        return done

    def count_valid(self, tokens: Sequence[int]) -> int:
        """The length of the longest allowed prefix of these draft tokens. The state does not change."""
        reopened = self._reopen()
        count = self._matcher.validate_tokens([*reopened, *tokens]) - len(reopened)
        if reopened:
            self._matcher.consume_tokens(reopened)
        return count

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        left = len(self._tokens) - count
        if count:
            self._cpu_seconds = self._cpu_seconds_before[left]
        del self._tokens[left:], self._cpu_seconds_before[left:]
        self._matcher.rollback(count)

    def _reopen(self) -> list[int]:
        """Where no text can follow, llguidance stops and refuses even the eos token. Then roll it back by one token,
        and return that token to be consumed again."""
        if self._matcher.stop_reason() != "NoExtension":
            return []
        self._matcher.rollback(1)
        return self._tokens[-1:]

    def _restart(self) -> bool:
        """Match the tokens so far with a fresh grammar, if that could help and is quick to compile."""
        if self._grammar.num_matchers == 1 or self._grammar.seconds > MAX_RECOMPILE_SECONDS:
            return False
        self._grammar = self._recompile()
        self._cpu_seconds += self._grammar.seconds
        self._matcher = self._grammar.new_matcher()
        return self._matcher.consume_tokens(self._tokens)

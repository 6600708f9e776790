"""Languages that answers have to be in: compiled for a model's tokens, then followed token by token.

The work is llguidance's (docs/decisions/005-llguidance.md), which is imported when the first language is compiled."""

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from quire.core.structured import Structured
from quire.text.grammar.mask_cache import CachingMatcher, MaskCache, RegexStates
from quire.text.grammar.source import grammar_source, invalid_grammar
from quire.text.grammar.tokenizer import GrammarTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import LLParserLimits

    from quire.text.tokenizers.tokenizer import Tokenizer

KEPT = 64  # languages that stay compiled while nobody uses them
DEEP_STACK = 256 * 2**20  # bytes: llguidance follows references by recursion
ALLOWANCE = 0.25  # CPU seconds that following one answer may take at once, and
ALLOWANCE_PER_TOKEN = 0.004  # for every token of it; ordinary schemas need a hundredth of that
SOON = 0.05  # seconds of compiling that the loop can wait for

T = TypeVar("T")


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


class GrammarCompiler:
    """Compiles each language once, and keeps those used last. One that somebody holds is always found again."""

    def __init__(self, tokenizer: "Callable[[], Tokenizer]", vocab_size: int) -> None:
        """`tokenizer` is called when the first language comes."""
        self._load_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: tuple[GrammarTokenizer, LLTokenizer] | None = None
        self._masks = MaskCache()
        self._compiling = threading.Lock()
        self._kept: OrderedDict[Structured, CompiledGrammar] = OrderedDict()
        self._known: WeakValueDictionary[Structured, CompiledGrammar] = WeakValueDictionary()

    def find(self, structured: Structured) -> CompiledGrammar | None:
        """If it is compiled."""
        return self._known.get(structured)

    def compile(self, structured: Structured, *, anew: bool = False) -> CompiledGrammar:
        """Raises BadRequest for a language that cannot be compiled within the limits. From any thread: others wait."""
        with self._compiling:
            grammar = known = self._known.get(structured)
            if grammar is None or anew:
                grammar = self._known[structured] = with_deep_stack(lambda: self._compile(structured, known))
            self._kept[structured] = grammar
            self._kept.move_to_end(structured)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def matcher(self, structured: Structured) -> GrammarMatcher | CachingMatcher:
        """At the beginning of an answer."""
        grammar = self.find(structured) or self.compile(structured)
        matcher = GrammarMatcher(grammar, lambda: self.compile(structured, anew=True))
        if grammar.states is None or not grammar.states.useful:
            return matcher
        return CachingMatcher(matcher, grammar.states)

    def _compile(self, structured: Structured, before: CompiledGrammar | None) -> CompiledGrammar:
        from llguidance import LLMatcher

        if self._vocabulary is None:
            tokens = GrammarTokenizer(self._load_tokenizer(), self._vocab_size)
            self._vocabulary = tokens, tokens.vocabulary()
        tokens, vocabulary = self._vocabulary
        begin = time.thread_time()
        start = LLMatcher(vocabulary, grammar_source(structured), log_level=0, limits=_limits())
        first = start.deep_copy()
        first.compute_bitmask()  # a language without words is noticed here
        for matcher in (start, first):
            if matcher.is_error():
                raise invalid_grammar(structured, matcher.get_error())
        seconds = time.thread_time() - begin
        if before is not None:
            states = before.states
        else:
            states = (
                RegexStates.of(structured.text, tokens.spelling, self._masks) if structured.kind == "regex" else None
            )
        return CompiledGrammar(start, -(-vocabulary.vocab_size // 32), seconds, states)


def _limits() -> "LLParserLimits":
    """What one language may cost, in units of work: the same everywhere, unlike seconds."""
    from llguidance._lib import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # while compiling: about 20 ms
        step_lexer_fuel=100_000,  # a mask: about 7 ms; those of ordinary schemas take 0.01 to 0.1 ms
        step_max_items=25_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,  # 2 kB each at most
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def with_deep_stack(work: Callable[[], T]) -> T:
    """Do it in a thread that may recurse further than this one."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(DEEP_STACK)
    thread = threading.Thread(target=run, name="deep stack", daemon=True)
    thread.start()
    threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

"""Languages that answers have to be in: compiled for a model's tokens, then followed token by token.

The work is llguidance's (docs/decisions/005-llguidance.md), which is imported when the first language is compiled."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from quire.core.structured import Structured
from quire.text.grammar.caching_matcher import CachingMatcher
from quire.text.grammar.mask_cache import MaskCache, RegexStates
from quire.text.grammar.matcher import CompiledGrammar, GrammarMatcher
from quire.text.grammar.source import grammar_source, invalid_grammar
from quire.text.grammar.tokenizer import GrammarTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import LLParserLimits

    from quire.text.tokenizers.tokenizer import Tokenizer

KEPT = 64  # languages that stay compiled while nobody uses them
DEEP_STACK = 256 * 2**20  # bytes: llguidance follows references by recursion

T = TypeVar("T")


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

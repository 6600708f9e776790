"""Compiles structured outputs into grammars for a model's tokens, and hands out matchers.

llguidance does the work (docs/decisions/005-llguidance.md). It is imported when the first grammar is compiled."""

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
from quire.text.grammar.source import grammar_source, refusal
from quire.text.grammar.tokenizer import GrammarTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import LLParserLimits

    from quire.text.tokenizers.tokenizer import Tokenizer

MAX_UNUSED_GRAMMARS = 64  # grammars that stay compiled while no request holds them
COMPILE_STACK_BYTES = 256 * 2**20  # llguidance follows references by recursion

T = TypeVar("T")


class GrammarCompiler:
    """Compiles each grammar once and keeps the most recently used ones. A grammar that is in use is never evicted."""

    def __init__(self, tokenizer: "Callable[[], Tokenizer]", vocab_size: int) -> None:
        """`tokenizer` is called when the first grammar is compiled."""
        self._load_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._tokenizers: tuple[GrammarTokenizer, LLTokenizer] | None = None
        self._masks = MaskCache()
        self._compile_lock = threading.Lock()
        self._recent: OrderedDict[Structured, CompiledGrammar] = OrderedDict()
        self._compiled: WeakValueDictionary[Structured, CompiledGrammar] = WeakValueDictionary()

    def find(self, structured: Structured) -> CompiledGrammar | None:
        """The grammar if it is compiled."""
        return self._compiled.get(structured)

    def compile(self, structured: Structured, *, recompile: bool = False) -> CompiledGrammar:
        """Raises BadRequest for a grammar that exceeds the limits. Thread-safe: other callers wait."""
        with self._compile_lock:
            grammar = previous = self._compiled.get(structured)
            if grammar is None or recompile:
                grammar = self._compiled[structured] = with_deep_stack(lambda: self._compile(structured, previous))
            self._recent[structured] = grammar
            self._recent.move_to_end(structured)
            if len(self._recent) > MAX_UNUSED_GRAMMARS:
                self._recent.popitem(last=False)
        return grammar

    def matcher(self, structured: Structured) -> GrammarMatcher | CachingMatcher:
        """A matcher at the start of a sequence."""
        grammar = self.find(structured) or self.compile(structured)
        matcher = GrammarMatcher(grammar, lambda: self.compile(structured, recompile=True))
        if grammar.states is None or not grammar.states.worth_caching:
            return matcher
        return CachingMatcher(matcher, grammar.states)

    def _compile(self, structured: Structured, previous: CompiledGrammar | None) -> CompiledGrammar:
        from llguidance import LLMatcher

        if self._tokenizers is None:
            ours = GrammarTokenizer(self._load_tokenizer(), self._vocab_size)
            self._tokenizers = ours, ours.build()
        tokenizer, ll_tokenizer = self._tokenizers
        begin = time.thread_time()
        source = grammar_source(structured, tokenizer.special_ids)
        start = LLMatcher(ll_tokenizer, source, log_level=0, limits=_parser_limits())
        first = start.deep_copy()
        first.compute_bitmask()  # a grammar that matches no text fails here
        for matcher in (start, first):
            if matcher.is_error():
                raise refusal(structured, matcher.get_error())
        seconds = time.thread_time() - begin
        if previous is not None:
            states = previous.states
        else:
            regex = structured.text if structured.kind == "regex" else None
            states = None if regex is None else RegexStates.of(regex, tokenizer.text_bytes, self._masks)
        return CompiledGrammar(start, -(-ll_tokenizer.vocab_size // 32), seconds, states)


def _parser_limits() -> "LLParserLimits":
    """What one grammar may cost, in units of work: unlike seconds, they are the same on every machine."""
    from llguidance._lib import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # to compile: about 20 ms
        step_lexer_fuel=100_000,  # for a mask: about 7 ms; those of ordinary schemas take 0.01 to 0.1 ms
        step_max_items=25_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,  # 2 kB each at most
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def with_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a stack of COMPILE_STACK_BYTES."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(COMPILE_STACK_BYTES)
    thread = threading.Thread(target=run, name="deep stack", daemon=True)
    thread.start()
    threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

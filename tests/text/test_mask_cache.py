"""Cached masks beside computed masks."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.structured import Structured
from quire.text.grammar import mask_cache
from quire.text.grammar.caching_matcher import CachingMatcher
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.grammar.mask_cache import MaskCache, RegexState
from quire.text.grammar.matcher import GrammarMatcher
from quire.text.tokenizers.tokenizer import Tokenizer
from text import regex_strategies
from trials import rounds

VOCAB = 49152
REGEXES = [
    "([A-Z][a-z]+ )*",
    r"(\d{4}-\d{2}-\d{2} )*",
    r"([^,\n]+(,[^,\n]+){3}\n)*",
    "([A-Z][a-z]{1,12} ){20}",
    "(abcdef|abcxyz)(hello world){2}[0-9]{3}",  # much of it is forced
    r"\s*\S+\s{0,3}ü*[α-ω]+(日本|語)?",  # characters of several tokens
    ".*",
    "(a|ab|abc){0,30}z?",
    r'"[^"\\]*"',
    r"[\w.-]+@[\w-]+\.(com|org)",
]


def caching_matcher(grammars: GrammarCompiler, structured: Structured) -> CachingMatcher:
    matcher = grammars.matcher(structured)
    assert isinstance(matcher, CachingMatcher)
    return matcher


def plain_matcher(grammars: GrammarCompiler, structured: Structured) -> GrammarMatcher:
    return GrammarMatcher(grammars.compile(structured), lambda: grammars.compile(structured, recompile=True))


def sample(mask: bytes, chance: random.Random, never: list[int]) -> int | None:
    """A random allowed token. Small ids, which are short and frequent tokens, are preferred."""
    tokens = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    tokens = tokens[~np.isin(tokens, never)]
    return int(tokens[int(chance.random() ** 3 * len(tokens))]) if len(tokens) else None


def walk_together(grammars: GrammarCompiler, tokenizer: Tokenizer, regex: str, seed: int) -> int:
    """Both matchers through one sequence, with rollbacks; the number of masks compared."""
    structured, chance = Structured("regex", regex), random.Random(seed)
    cached, plain = caching_matcher(grammars, structured), plain_matcher(grammars, structured)
    taken: list[int] = []
    for count in range(40):
        mask = cached.mask()
        assert mask == plain.mask(), (regex, taken)
        assert not cached.error
        token = sample(mask, chance, tokenizer.eos_ids)
        if token is None:
            assert cached.ended == plain.ended
            return count
        back = chance.randrange(4) if taken and chance.random() < 0.1 else 0
        back = min(back, len(taken))
        if back:
            for matcher in (cached, plain):
                matcher.rollback(back)
            again, taken[-back:] = taken[-back:], []
            assert cached.count_valid([*again, token]) == plain.count_valid([*again, token]) == back + 1
        else:
            again = []
        for matcher in (cached, plain):
            assert matcher.advance([*again, token])
        taken += [*again, token]
    return 40


@pytest.mark.parametrize("regex", REGEXES)
def test_cached_masks_are_those_computed(grammars: GrammarCompiler, tokenizer: Tokenizer, regex: str) -> None:
    compared = sum(walk_together(grammars, tokenizer, regex, seed) for seed in range(4))
    states = grammars.compile(Structured("regex", regex)).states
    assert states is not None
    assert compared > 20
    assert states._num_hits > compared / 10, "the test has not met a state twice"


@pytest.mark.trial
@settings(max_examples=rounds(40), deadline=None)
@given(regex_strategies.REGEXES, st.integers(0, 2**32))
def test_any_regex(grammars: GrammarCompiler, tokenizer: Tokenizer, regex: str, seed: int) -> None:
    walked = [walk_together(grammars, tokenizer, regex, seed + number) for number in range(2)]
    assert all(0 <= count <= 40 for count in walked)  # every mask on the way has been compared


def test_dropped_states_and_masks_are_computed_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_cache, "MAX_STATES_BYTES", 8000)
    grammars = GrammarCompiler(lambda: tokenizer, VOCAB)
    grammars._masks = MaskCache(4 * VOCAB // 8)  # room for four masks
    for regex in REGEXES[:4]:
        assert sum(walk_together(grammars, tokenizer, regex, seed) for seed in range(2)) > 20
        states = grammars.compile(Structured("regex", regex)).states
        assert states is not None
        assert states._num_bytes <= 8000
        assert sum(state.mask is not None for state in states._states.values()) <= 4


def test_the_mask_cache_evicts_the_least_recently_used() -> None:
    cache, states = MaskCache(30), [RegexState(frozenset(), b"") for _ in range(4)]
    for state in states[:3]:
        cache.put(state, b"0123456789")
    assert cache.get(states[0]) == b"0123456789"
    cache.put(states[3], b"abcdefghij")
    assert [cache.get(state) is not None for state in states] == [True, False, True, True]


def test_the_end_of_a_text_and_a_token_that_does_not_match(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = Structured("regex", "ab|cd")
    [whole] = tokenizer.encode("ab", add_special_tokens=False)
    [other] = tokenizer.encode(" the", add_special_tokens=False)
    for _ in range(2):  # the second time every mask is cached
        matcher = caching_matcher(grammars, structured)
        matcher.mask()
        assert matcher.advance([whole])
        assert sample(matcher.mask(), random.Random(0), tokenizer.eos_ids) is None  # only eos may follow
        assert matcher.advance(tokenizer.eos_ids[:1])
        assert matcher.ended
        matcher = caching_matcher(grammars, structured)
        matcher.mask()
        assert not matcher.advance([other])
        assert matcher.error


def test_replaying_a_sequence_does_not_ask_llguidance(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = Structured("regex", "([A-Z][a-z]+ )*")
    tokens = tokenizer.encode("Quiet Rivers Run Deep ", add_special_tokens=False)
    first = caching_matcher(grammars, structured)
    for token in tokens:
        first.mask()
        assert first.advance([token])
    mask, again = first.mask(), caching_matcher(grammars, structured)
    assert again.advance(tokens)
    assert again._pending == tokens
    assert again.mask() == mask
    assert again._pending == tokens


def test_a_regex_whose_states_never_repeat_is_not_cached(
    grammars: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_cache, "MIN_LOOKUPS", 50)
    structured = Structured("regex", "[a-z]{100}")
    matcher = caching_matcher(grammars, structured)
    [character] = tokenizer.encode("z", add_special_tokens=False)
    for _ in range(60):
        matcher.mask()
        assert matcher.advance([character])
    assert isinstance(grammars.matcher(structured), GrammarMatcher)


def test_a_regex_without_an_automaton_has_a_plain_matcher(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(Structured("regex", "(?i)yes|no"))
    assert isinstance(matcher, GrammarMatcher)
    assert matcher.advance(tokenizer.encode("YES", add_special_tokens=False))

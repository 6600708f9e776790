"""Masks that are remembered beside masks that are made."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.structured import Structured
from quire.text.grammar import mask_cache as grammar_states
from quire.text.grammar.compiler import GrammarCompiler, GrammarMatcher
from quire.text.grammar.mask_cache import MaskShelf, RememberingMatcher, State
from quire.text.tokenizers.tokenizer import Tokenizer
from text import expressions
from trials import LENGTH

VOCAB = 49152
EXPRESSIONS = [
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


def remembering(grammars: GrammarCompiler, structured: Structured) -> RememberingMatcher:
    matcher = grammars.matcher(structured)
    assert isinstance(matcher, RememberingMatcher)
    return matcher


def plain(grammars: GrammarCompiler, structured: Structured) -> GrammarMatcher:
    return GrammarMatcher(grammars.compile(structured), lambda: grammars.compile(structured, anew=True))


def drawn(mask: bytes, chance: random.Random, never: list[int]) -> int | None:
    """Small numbers, which are short and frequent tokens, are preferred."""
    tokens = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    tokens = tokens[~np.isin(tokens, never)]
    return int(tokens[int(chance.random() ** 3 * len(tokens))]) if len(tokens) else None


def walk_together(grammars: GrammarCompiler, tokenizer: Tokenizer, expression: str, seed: int) -> int:
    """Both matchers through one answer, some of it forgotten and taken in again; how many masks were compared."""
    structured, chance = Structured("regex", expression), random.Random(seed)
    ours, theirs = remembering(grammars, structured), plain(grammars, structured)
    taken: list[int] = []
    for count in range(40):
        mask = ours.mask()
        assert mask == theirs.mask(), (expression, taken)
        assert not ours.error
        token = drawn(mask, chance, tokenizer.eos_ids)
        if token is None:
            assert ours.ended == theirs.ended
            return count
        back = chance.randrange(4) if taken and chance.random() < 0.1 else 0
        back = min(back, len(taken))
        if back:
            for matcher in (ours, theirs):
                matcher.rollback(back)
            again, taken[-back:] = taken[-back:], []
            assert ours.count_valid([*again, token]) == theirs.count_valid([*again, token]) == back + 1
        else:
            again = []
        for matcher in (ours, theirs):
            assert matcher.advance([*again, token])
        taken += [*again, token]
    return 40


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_remembered_is_made(grammars: GrammarCompiler, tokenizer: Tokenizer, expression: str) -> None:
    compared = sum(walk_together(grammars, tokenizer, expression, seed) for seed in range(4))
    states = grammars.compile(Structured("regex", expression)).states
    assert states is not None
    assert compared > 20
    assert states._num_found > compared / 10, "the test has not met a state twice"


@pytest.mark.trial
@settings(max_examples=40 * LENGTH, deadline=None)
@given(expressions.EXPRESSIONS, st.integers(0, 2**32))
def test_any_expression(grammars: GrammarCompiler, tokenizer: Tokenizer, expression: str, seed: int) -> None:
    walked = [walk_together(grammars, tokenizer, expression, seed + number) for number in range(2)]
    assert all(0 <= count <= 40 for count in walked)  # every mask on the way has been compared


def test_what_was_forgotten_is_made_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_states, "STATES_BYTES", 8000)
    grammars = GrammarCompiler(lambda: tokenizer, VOCAB)
    grammars._masks = MaskShelf(4 * VOCAB // 8)  # of four
    for expression in EXPRESSIONS[:4]:
        assert sum(walk_together(grammars, tokenizer, expression, seed) for seed in range(2)) > 20
        states = grammars.compile(Structured("regex", expression)).states
        assert states is not None
        assert states._num_bytes <= 8000
        assert sum(state.mask is not None for state in states._known.values()) <= 4


def test_the_shelf_keeps_what_was_used_last() -> None:
    shelf, states = MaskShelf(30), [State(frozenset(), b"") for _ in range(4)]
    for state in states[:3]:
        shelf.put(state, b"0123456789")
    assert shelf.find(states[0]) == b"0123456789"
    shelf.put(states[3], b"abcdefghij")
    assert [shelf.find(state) is not None for state in states] == [True, False, True, True]


def test_the_end_and_what_is_outside(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = Structured("regex", "ab|cd")
    [whole] = tokenizer.encode("ab", add_special_tokens=False)
    [other] = tokenizer.encode(" the", add_special_tokens=False)
    for _ in range(2):  # the second time everything is known
        matcher = remembering(grammars, structured)
        matcher.mask()
        assert matcher.advance([whole])
        assert drawn(matcher.mask(), random.Random(0), tokenizer.eos_ids) is None  # only the end may follow
        assert matcher.advance(tokenizer.eos_ids[:1])
        assert matcher.ended
        matcher = remembering(grammars, structured)
        matcher.mask()
        assert not matcher.advance([other])
        assert matcher.error


def test_answers_that_are_replayed_ask_nobody(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = Structured("regex", "([A-Z][a-z]+ )*")
    tokens = tokenizer.encode("Quiet Rivers Run Deep ", add_special_tokens=False)
    first = remembering(grammars, structured)
    for token in tokens:
        first.mask()
        assert first.advance([token])
    mask, again = first.mask(), remembering(grammars, structured)
    assert again.advance(tokens)
    assert again._owed == tokens
    assert again.mask() == mask
    assert again._owed == tokens


def test_states_that_are_never_met_again_are_given_up(
    grammars: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_states, "TRIAL", 50)
    structured = Structured("regex", "[a-z]{100}")
    matcher = remembering(grammars, structured)
    [letter] = tokenizer.encode("z", add_special_tokens=False)
    for _ in range(60):
        matcher.mask()
        assert matcher.advance([letter])
    assert isinstance(grammars.matcher(structured), GrammarMatcher)


def test_expressions_that_are_not_read_are_followed_all_the_same(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = grammars.matcher(Structured("regex", "(?i)yes|no"))
    assert isinstance(matcher, GrammarMatcher)
    assert matcher.advance(tokenizer.encode("YES", add_special_tokens=False))

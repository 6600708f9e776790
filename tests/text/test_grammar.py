"""Grammars, compiled for a real vocabulary and walked through at random."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from quire.core.errors import BadRequest
from quire.core.structured import MAX_CHARACTERS, MAX_CHOICES, Structured
from quire.text.grammar import compiler, json_schema
from quire.text.grammar import matcher as grammar_matcher
from quire.text.grammar import tokenizer as grammar_tokenizer
from quire.text.grammar.compiler import MAX_UNUSED_GRAMMARS, GrammarCompiler
from quire.text.grammar.matcher import GrammarMatcher
from quire.text.tokenizers.tokenizer import Tokenizer

VOCAB = 49152


def bits(matcher: GrammarMatcher) -> np.ndarray:
    options = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")[:VOCAB].astype(bool)
    assert not matcher.error, matcher.error
    return options


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(np.flatnonzero(bits(matcher)).tolist())


@pytest.fixture(scope="module")
def closing(tokenizer: Tokenizer) -> list[int]:
    return [token for token in range(VOCAB) if tokenizer.token_bytes(token) in (b'"', b"}", b"]", b")")]


def walk(grammars: GrammarCompiler, tokenizer: Tokenizer, structured: Structured, seed: int, closing: list[int]) -> str:
    """A random text that the grammar allows. Tokens that close something are preferred more and more."""
    chance, matcher, tokens = random.Random(seed), grammars.matcher(structured), []
    for step in range(400):
        options = bits(matcher)
        may_end = options[tokenizer.eos_ids].any()
        options[tokenizer.eos_ids] = False
        if may_end and (not options.any() or chance.random() < 0.3):
            return tokenizer.decode(tokens)
        closers = [token for token in closing if options[token]]
        if not closers or chance.random() > step / 60:
            closers = np.flatnonzero(options).tolist()
        tokens.append(chance.choice(closers))
        assert matcher.advance(tokens[-1:])
    raise AssertionError(f"no end in sight: {tokenizer.decode(tokens)!r}")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "when": {"type": "string", "format": "date"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
}
GBNF = 'root ::= item ("," item)*\nitem ::= [0-9] | "(" root ")"\n'
LARK = 'start: item ("," item)*\nitem: /[0-9]/ | "(" start ")"\n'


def is_list(text: str) -> bool:
    while (shorter := re.sub(r"\([0-9](,[0-9])*\)", "0", text)) != text:
        text = shorter
    return re.fullmatch(r"[0-9](,[0-9])*", text) is not None


GRAMMARS: dict[str, tuple[Structured, Any]] = {
    "json": (Structured("json"), lambda text: isinstance(json.loads(text), dict)),
    "schema": (
        Structured("json_schema", json.dumps(SCHEMA)),
        lambda text: Draft202012Validator(SCHEMA).is_valid(json.loads(text)),
    ),
    "any": (Structured("json_schema", "true"), lambda text: json.loads(text) is not ...),
    "regex": (
        Structured("regex", r"[a-c]{2,5}/\d+(é|ß)?"),
        lambda text: re.fullmatch(r"[a-c]{2,5}/[0-9]+(é|ß)?", text),
    ),
    "choice": (Structured.one_of(["yes", "no", "näh\n", '"']), lambda text: text in ["yes", "no", "näh\n", '"']),
    "gbnf": (Structured("grammar", GBNF), is_list),
    "lark": (Structured("grammar", LARK), is_list),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_random_walk_matches(grammars: GrammarCompiler, tokenizer: Tokenizer, closing: list[int], name: str) -> None:
    structured, check = GRAMMARS[name]
    for seed in range(6):
        text = walk(grammars, tokenizer, structured, seed, closing)
        assert check(text), text


def test_where_the_text_must_end_only_eos_is_allowed(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(Structured.one_of(["yes", "yesterday"]))
    assert not allowed(matcher) & set(tokenizer.eos_ids)
    assert matcher.advance(tokenizer.encode("yes", add_special_tokens=False))
    assert set(tokenizer.eos_ids) < allowed(matcher)
    assert matcher.advance(tokenizer.encode("terday", add_special_tokens=False))
    assert allowed(matcher) == set(tokenizer.eos_ids)


def test_special_tokens_are_no_text(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    options = allowed(grammars.matcher(Structured("regex", "(?s:.*)")))
    assert options & tokenizer.special_ids == set(tokenizer.eos_ids)
    assert len(options) > VOCAB * 0.9


def test_mismatches_are_refused_and_drafts_counted(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(Structured("regex", "[0-9]+;"))
    digits, words = (tokenizer.encode(text, add_special_tokens=False) for text in ("1234", "abc"))
    before = matcher.mask()
    assert matcher.count_valid([*digits, *words]) == len(digits)
    assert matcher.mask() == before
    assert matcher.advance(digits)
    matcher.rollback(len(digits))
    assert matcher.mask() == before
    assert not matcher.advance(words)
    assert matcher.error


# -- JSON as it is written ------------------------------------------------------------------------------------------


def accepts(grammars: GrammarCompiler, tokenizer: Tokenizer, structured: Structured, text: str) -> bool:
    """The whole text is allowed, and may end."""
    matcher, tokens = grammars.matcher(structured), tokenizer.encode(text, add_special_tokens=False)
    return matcher.advance(tokens) and bool(allowed(matcher) & set(tokenizer.eos_ids))


SUCCESS = {"type": "object", "properties": {"success": {"type": "boolean"}}, "required": ["success"]}


@pytest.mark.parametrize(
    ("text", "usual", "none", "tabs"),
    [
        ('{"success":true}', True, True, True),
        ('{"success": true}', True, False, False),
        ('{\n  "success": true\n}', True, False, False),
        ('{\n\n\t"success":true}', True, False, False),
        ('{\t"success":\ttrue}', False, False, True),
        ('{  "success":true}', False, False, False),
        ('{\n\n\n"success":true}', False, False, False),
        ("{\n" + " " * 21 + '"success":true}', False, False, False),
        (' {"success":true}', False, False, False),
        ('{"success":true}\n', False, False, False),
    ],
)
def test_white_space_is_a_space_or_a_line_break_with_an_indentation(
    grammars: GrammarCompiler, tokenizer: Tokenizer, text: str, usual: bool, none: bool, tabs: bool
) -> None:
    """Up to 40 blanks in every gap let a model spend hundreds of tokens on one boolean."""
    for pattern, expected in ((None, usual), ("", none), (r"[\t]*", tabs), (r"\s{1,50}|", True)):
        structured = Structured("json_schema", json.dumps(SUCCESS), whitespace_pattern=pattern)
        outside = text[0] == " " or text[-1] == "\n"
        assert accepts(grammars, tokenizer, structured, text) == (expected and not outside), pattern


def test_an_object_is_open_unless_it_is_asked_to_be_closed(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for text, closed, expected in [
        ('{"success": true, "more": [1]}', None, True),
        ('{"success": true, "more": [1]}', True, False),
        ('{"success": true}', True, True),
    ]:
        structured = Structured("json_schema", json.dumps(SUCCESS), disable_additional_properties=closed)
        assert accepts(grammars, tokenizer, structured, text) == expected
    undeclared = Structured("json_schema", '{"properties": {"a": {}}, "required": ["b"]}')
    assert accepts(grammars, tokenizer, undeclared, '{"a": 1, "b": 2}')


def test_escaped_characters_are_characters(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    word = Structured("json_schema", '{"type": "string", "maxLength": 4}')
    assert accepts(grammars, tokenizer, word, r'"f\u00fcr"') and accepts(grammars, tokenizer, word, '"für"')
    assert accepts(grammars, tokenizer, word, r'"\ud83d\ude00"') and not accepts(grammars, tokenizer, word, r'"\ud83d"')


def test_formats_that_no_standard_names_are_annotations(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for name in ("regex", "password", "idn-hostname", "color"):
        assert accepts(grammars, tokenizer, Structured("json_schema", json.dumps({"format": name})), '"(x"')


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Structured, str]] = {
    "unique items": (Structured("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "not": (Structured("json_schema", '{"not": {"type": "null"}}'), "not"),
    "if": (Structured("json_schema", '{"if": {"type": "null"}, "then": true}'), "if"),
    "even if it asks not to be": (
        Structured("json_schema", '{"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}'),
        "uniqueItems",
    ),
    "two may hold": (Structured("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}'), "oneOf"),
    "elsewhere": (Structured("json_schema", '{"$ref": "https://example.com/schema"}'), "example.com"),
    "nothing is valid": (Structured("json_schema", "false"), "nothing is valid"),
    "nothing but itself": (Structured("json_schema", '{"$ref": "#"}'), "cannot be used"),
    "no schema": (Structured("json_schema", "5"), "a schema is an object"),
    "no JSON": (Structured("json_schema", '{"type": '), "not JSON"),
    "deep": (Structured("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
    "look-around": (Structured("regex", "(?!a)b"), "look-around"),
    "backreferences": (Structured("regex", r"(a)\1"), "backreferences"),
    "no regex": (Structured("regex", "(a"), "unclosed"),
    "parentheses": (Structured("regex", "(" * 5000 + ")" * 5000), "nested"),
    "an unknown rule": (Structured("grammar", "root ::= foo"), "`foo`, which is not defined"),
    "no grammar": (Structured("grammar", "root ::= ((("), "not closed"),
    "no JSON inside a tag": (Structured("structural_tag", "{"), "not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(grammars: GrammarCompiler, name: str) -> None:
    structured, word = REFUSED[name]
    with pytest.raises(BadRequest, match=word) as refusal:
        grammars.compile(structured)
    assert len(refusal.value.message) < 500
    assert refusal.value.param == "structured"


WRONG_PARTS: dict[str, tuple[Any, str]] = {
    "a keyword": ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "`uniqueItems` .*at `#/properties/a/items`"),
    "a pattern": ({"items": {"pattern": "(?!a)b"}}, "error: look-around.* at `#/items`"),
    "two keywords": ({"items": {"if": {}, "then": {}}}, "`if` and `then` are not supported at `#/items`"),
    "behind a reference": ({"$ref": "#/$defs/a~b", "$defs": {"a~b": {"not": {}}}}, "`not` .*at `#/.defs/a~0b`"),
    "oneOf": ({"items": {"oneOf": [{"minimum": 1}, {"type": "integer"}]}}, "`oneOf` at `#/items` is supported where"),
    "bounds": (
        {
            "type": "object",
            "properties": {"x": False, "a/b": {"type": "integer", "minimum": 5, "maximum": 3}},
            "required": ["a/b"],
        },
        "nothing is valid by the schema at `#/properties/a~1b`: minimum",
    ),
    "a required property": (
        {"items": {"type": "object", "properties": {"a": False}, "required": ["a"]}, "minItems": 1, "type": "array"},
        "nothing is valid by the schema at `#/items`: required property 'a'",
    ),
    "all of several": ({"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}]}, "at `#/anyOf/0`: minLength"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_refusal_names_the_path(grammars: GrammarCompiler, name: str) -> None:
    schema, words = WRONG_PARTS[name]
    with pytest.raises(BadRequest, match=words):
        grammars.compile(Structured("json_schema", json.dumps(schema)))


def test_finding_the_path_is_bounded(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "MAX_LOCATE_SECONDS", 0.0)
    with pytest.raises(BadRequest, match="`not` is not supported\nhint"):
        grammars.compile(Structured("json_schema", json.dumps({"items": {"not": {"type": "string"}}})))


def test_what_is_too_long_is_refused_before_anything_is_done() -> None:
    with pytest.raises(BadRequest, match=f"{MAX_CHARACTERS} are allowed"):
        Structured("regex", "a" * (MAX_CHARACTERS + 1))
    with pytest.raises(BadRequest, match=f"{MAX_CHOICES} are allowed"):
        Structured.one_of(["x"] * 10**6)
    for wrong in ([], "text", [1]):
        with pytest.raises(BadRequest, match="choice"):
            Structured.of(choice=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="json and regex"):
        Structured.of(json={}, regex="a")


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_kept_while_it_is_used(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(lambda: tokenizer, VOCAB)
    held = grammars.compile(Structured("regex", "a0"))
    for number in range(1, MAX_UNUSED_GRAMMARS + 3):
        grammars.compile(Structured("regex", f"a{number}"))
    assert grammars.find(Structured("regex", "a0")) is held is grammars.compile(Structured("regex", "a0"))
    assert grammars.find(Structured("regex", "a1")) is None
    assert grammars.find(Structured("regex", f"a{MAX_UNUSED_GRAMMARS + 2}")) is not None


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits that a few tokens reach."""
    from llguidance._lib import LLParserLimits

    limits = LLParserLimits(max_lexer_states=400, verbose_errors=False)
    monkeypatch.setattr(compiler, "_parser_limits", lambda: limits)
    yield


def test_states_of_other_matchers_do_not_count_against_the_limit(tokenizer: Tokenizer, few_states: None) -> None:
    """Matchers of a grammar share the states that they discover, and all of them stop at the limit."""
    grammars = GrammarCompiler(lambda: tokenizer, VOCAB)
    word = Structured("regex", "[a-z]{1,2000}")
    fresh = grammars.matcher(word)
    character = tokenizer.encode("z", add_special_tokens=False)
    masks = [fresh.mask()]
    for _ in range(30):
        assert fresh.advance(character)
        masks.append(fresh.mask())
    long = grammars.matcher(word)
    for _ in range(2000):
        if not long.advance(character) or not long.mask() or long.error:
            break
    assert "too many states" in long.error  # alone it gets that far and no further
    again = grammars.matcher(word)
    assert [again.mask(), *(again.advance(character) and again.mask() for _ in range(30))] == masks
    assert not again.error


def test_a_grammar_that_takes_too_long_to_match_ends(
    grammars: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_matcher, "BASE_CPU_SECONDS", 0.02)
    matcher = grammars.matcher(Structured("grammar", 'start: a\na: a a a | a a | "x" | ""'))
    character = tokenizer.encode("x", add_special_tokens=False)
    for _ in range(1000):
        matcher.mask()
        if matcher.error or not matcher.advance(character):
            break
    assert "matching took" in matcher.error


def test_cached_encodings_are_those_computed_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokenizer, "MAX_CACHED_TEXTS", 8)
    texts = [f'"key {number}": '.encode() for number in range(20)] + [b"x" * 1000]
    tokens = grammar_tokenizer.GrammarTokenizer(tokenizer, VOCAB)
    for text in texts + texts[::-1]:
        fresh = tokens._encode(text)
        assert tokens(text) == tokens(text) == fresh
        assert b"".join(map(tokenizer.token_bytes, fresh)) == text
        assert len(tokens._encoded) <= 8

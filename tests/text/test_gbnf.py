"""Grammars in GBNF and Lark: what they accept, and what is wrong with them."""

import pytest

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.grammar.gbnf import gbnf_to_lark
from quire.text.tokenizers.tokenizer import Tokenizer

# A grammar, texts of its language, and others.
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "nested repeats": ('root ::= (("a"+)* "b"?){1,2} "c"', ["c", "aabac", "bc"], ["aab", "bbbc"]),
    "a repeat of a repeat": ('root ::= "a"{2}*', ["", "aa", "aaaa"], ["a", "aaa"]),
    "single quotes": ("root ::= 'a' \"'\" '\"' '\\''", ["a'\"'"], ['a"']),
    "escapes in text": (r'root ::= "\u00e9\x41\U0001F600\\\"\n"', ['éA😀\\"\n'], ["e"]),
    "escapes in sets": (r"root ::= [\u00e0-\u00ff\]\[\-^/]+", ["éÿ][-^/"], ["e", "\\"]),
    "signs in sets": (r"root ::= [^a&&b~~#\"-]+", ["e!", "}{.*"], ["a", "&", "~", "-", '"', "#"]),
    "what is not in a set": (
        r'root ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt])* "\""',
        ['"a\\n"'],
        ['"\n"', '"\\x"'],
    ),
    "any character": ("root ::= . .", ["\n😀"], ["a"]),
    "two words of one rule": ("root ::= word word\nword ::= [a-z]+", ["ab", "abcd"], ["a", "a b"]),
    "a text that begins like another": ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab"]),
    "alternatives on lines of their own": (
        'root ::= "a" # one\n  | "b"\n  | ("c"\n | "d")\nx ::= "e"',
        ["a", "b", "d"],
        ["e"],
    ),
    "names": (
        'root ::= fooBar foo-bar foo_bar Foobar\nfooBar ::= "1"\nfoo-bar ::= "2"\nfoo_bar ::= "3"\nFoobar ::= "4"',
        ["1234"],
        ["12"],
    ),
    "nothing": ('root ::= "(" root? ")" | ', ["", "()", "(())"], ["("]),
    "recursion": ('root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"', ["1+(2+34)", "7"], ["1+", "(1"]),
    "numbers of repeats": ('root ::= "a"{ 2 , 3 } "b"{,2} "c"{1,}', ["aac", "aaabbcc"], ["ac", "aab", "aabbbc"]),
    "a special token": ("root ::= <|im_start|> [a-z]+", ["<|im_start|>abc"], ["abc"]),
    "any other token": ("root ::= !<|im_start|> !<[1]>", [" the the"], ["<|im_start|> the"]),
    "Lark with a modified start": ('?start: a\n!a.2: "x" a | "y" -> end', ["y", "xxy"], ["x"]),
    "Lark": ('%import common.INT\nstart: INT ("," INT)*', ["1,22"], ["a"]),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_accepts_its_language(grammars: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    grammar, right, wrong = GRAMMARS[name]
    structured = Structured("grammar", grammar)
    for text in right + wrong:
        matcher, tokens = grammars.matcher(structured), tokenizer.encode(text, add_special_tokens=False)
        mask = matcher.mask() if matcher.advance(tokens) else b""
        assert bool(mask and any(mask[eos // 8] >> eos % 8 & 1 for eos in tokenizer.eos_ids)) == (text in right), text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('foo ::= "a"', "no rule `root`"),
        ("root ::= a b\nb ::= 'x'", "rule `root` uses `a`, which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "`root` is defined twice, in line 2"),
        ('root ::= ("a"\n', "not closed, in line 1"),
        ('root ::= "a")', "closes nothing"),
        ("root ::= * ", "repeats nothing"),
        ('root ::= "a"{}', "has no number"),
        ('root ::= "a"{3,2}', "below the least"),
        ('root ::= "a"{1,999999}', "above 100000"),
        ('\nroot ::= "a" $', r"cannot read `\$`, in line 2"),
        (r'root ::= "\q"', r"no escape `\\q`"),
        (r'root ::= "\uD800"', "no character 0xd800"),
        ("root ::= [z-a]", "range `z-a` is empty"),
        ("root ::= !<nothing>", "no special token"),
        ("root ::= " + "(" * 300 + "'a'" + ")" * 300, "nested deeper"),
    ],
)
def test_a_mistake_is_named_with_its_line(grammars: GrammarCompiler, grammar: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        grammars.compile(Structured("grammar", grammar))


def test_a_long_grammar_is_read_in_a_moment() -> None:
    rules = "\n".join(f'r{n} ::= "a" r{n + 1} | [b-d]+' for n in range(2000))
    assert len(gbnf_to_lark(f'root ::= r0\n{rules}\nr2000 ::= "x"')) > 40_000

"""Automata beside Python's own expressions, on what both mean alike."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.grammar.regex_automaton import MAX_NODES, Automaton, NotRead
from text.expressions import EXPRESSIONS
from trials import LENGTH

TEXTS = st.text("abcé語1. -\n", max_size=8)


def accepts(automaton: Automaton, text: str) -> bool:
    places = automaton.start
    for character in text:
        places = automaton.step(places, character)
    return 0 in places


@pytest.mark.trial
@settings(max_examples=300 * LENGTH, deadline=None)
@given(EXPRESSIONS, st.lists(TEXTS, min_size=5, max_size=20))
def test_as_python_reads_it(expression: str, texts: list[str]) -> None:
    automaton, theirs = Automaton(expression), re.compile(re.sub(r"\\[dw]", r"(?a:\g<0>)", expression))
    if r"[(?a:\d)-]" in theirs.pattern:  # flags do not go into sets
        theirs = re.compile(theirs.pattern.replace(r"[(?a:\d)-]", "[0-9-]"))
    for text in texts:
        assert accepts(automaton, text) == bool(theirs.fullmatch(text)), text


@pytest.mark.parametrize(
    ("expression", "inside", "outside"),
    [
        ("", [""], ["a"]),
        ("a|", ["a", ""], ["b"]),
        (r"\s", [" ", "\n", "\x85", "\u00a0", "\u2003", "\u3000"], ["a", "\x1c", "\u200b"]),
        (r"\S\W\D", ["a-é", "é ٣"], ["aaa", " -a", "a-3"]),
        (r"[^\s\d]", ["a", "٣"], ["3", " "]),
        (r"[\S]", ["a", "\U0010ffff"], [" "]),
        (r"[+--]", ["+", ",", "-"], ["."]),
        (r"[a\]\-\\^]{2}", ["]-", "\\^", "aa"], ["b]"]),
        (r"(a{2}){3}", ["aaaaaa"], ["aaaaa", "aaaaaaa"]),
        (r"((a*)*|b)*c", ["c", "aabac"], ["", "cc"]),
        ("[^\n]\r\t", ["x\r\t"], ["\n\r\t"]),
        (r"\f\v\n", ["\f\v\n"], ["fvn"]),
    ],
)
def test_meaning(expression: str, inside: list[str], outside: list[str]) -> None:
    automaton = Automaton(expression)
    assert [accepts(automaton, text) for text in inside] == [True] * len(inside)
    assert [accepts(automaton, text) for text in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    "expression",
    [
        "^a", "a$", r"\bA", r"\p{L}", r"\1", r"\Q", "(?i)a", "(?=a)", "(?P<name>a)", "[[:alpha:]]", "[a&&b]", "[a--b]",
        "[a~~b]", "[a-b-c]", "[]a]", "[^]", "[z-a]", r"[\d-z]", r"[a-\d]", "a{,3}", "a{3,2}", "a{x}", "a{2", "{2}", "}",
        "]", "*a", "(a", "a)", "[a", "a\\", r"\x4", r"\xg0", "a***?+", "a{100000}",
        "a" * (MAX_NODES + 1), "(a{100}){101}", "(a?){300}", "(" * 200 + "a" + ")" * 200, "a|" * 300,
    ],
)  # fmt: skip
def test_what_may_mean_something_else_is_not_read(expression: str) -> None:
    with pytest.raises(NotRead):
        Automaton(expression)


def test_much_of_nothing_is_soon_read() -> None:
    assert accepts(Automaton("((){99999}){99999}"), "")
    with pytest.raises(NotRead):
        Automaton("((){0,99999}){0,99999}")


def test_too_many_places_on_the_way() -> None:
    automaton = Automaton("(a|b)*a(a|b){400}")
    places = automaton.start
    with pytest.raises(NotRead):
        for _ in range(400):
            places = automaton.step(places, "a")

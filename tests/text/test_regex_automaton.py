"""Automata beside Python's `re`, on syntax that means the same to both."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.grammar.regex_automaton import MAX_NODES, RegexAutomaton, UnsupportedRegex
from text.regex_strategies import REGEXES
from trials import rounds

TEXTS = st.text("abcé語1. -\n", max_size=8)


def accepts(automaton: RegexAutomaton, text: str) -> bool:
    active = automaton.start
    for character in text:
        active = automaton.step(active, character)
    return 0 in active


@pytest.mark.trial
@settings(max_examples=rounds(300), deadline=None)
@given(REGEXES, st.lists(TEXTS, min_size=5, max_size=20))
def test_the_automaton_matches_what_python_matches(regex: str, texts: list[str]) -> None:
    automaton, theirs = RegexAutomaton(regex), re.compile(re.sub(r"\\[dw]", r"(?a:\g<0>)", regex))
    if r"[(?a:\d)-]" in theirs.pattern:  # flags are not allowed within brackets
        theirs = re.compile(theirs.pattern.replace(r"[(?a:\d)-]", "[0-9-]"))
    for text in texts:
        assert accepts(automaton, text) == bool(theirs.fullmatch(text)), text


@pytest.mark.parametrize(
    ("regex", "matching", "other"),
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
def test_syntax(regex: str, matching: list[str], other: list[str]) -> None:
    automaton = RegexAutomaton(regex)
    assert [accepts(automaton, text) for text in matching] == [True] * len(matching)
    assert [accepts(automaton, text) for text in other] == [False] * len(other)


@pytest.mark.parametrize(
    "regex",
    [
        "^a", "a$", r"\bA", r"\p{L}", r"\1", r"\Q", "(?i)a", "(?=a)", "(?P<name>a)", "[[:alpha:]]", "[a&&b]", "[a--b]",
        "[a~~b]", "[a-b-c]", "[]a]", "[^]", "[z-a]", r"[\d-z]", r"[a-\d]", "a{,3}", "a{3,2}", "a{x}", "a{2", "{2}", "}",
        "]", "*a", "(a", "a)", "[a", "a\\", r"\x4", r"\xg0", "a***?+", "a{100000}",
        "a" * (MAX_NODES + 1), "(a{100}){101}", "(a?){300}", "(" * 200 + "a" + ")" * 200, "a|" * 300,
    ],
)  # fmt: skip
def test_syntax_that_may_mean_something_else_is_refused(regex: str) -> None:
    with pytest.raises(UnsupportedRegex):
        RegexAutomaton(regex)


def test_repetitions_of_nothing_are_parsed_quickly() -> None:
    assert accepts(RegexAutomaton("((){99999}){99999}"), "")
    with pytest.raises(UnsupportedRegex):
        RegexAutomaton("((){0,99999}){0,99999}")


def test_too_many_active_nodes() -> None:
    automaton = RegexAutomaton("(a|b)*a(a|b){400}")
    active = automaton.start
    with pytest.raises(UnsupportedRegex):
        for _ in range(400):
            active = automaton.step(active, "a")

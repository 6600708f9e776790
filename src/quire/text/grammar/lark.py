"""Lark, as llguidance reads it."""

import re
from collections.abc import Mapping

from quire.text.grammar.gbnf import gbnf_to_lark

_LARK_START = re.compile(r"(?m)^\s*(%llguidance\b|[?!]*start\s*(\.\s*-?\d+\s*)?:)")
# What only shapes the tree or orders derivations: there is no tree, and the language is the same without.
_MODIFIER = re.compile(r"(?m)^([ \t]*)[?!]+(?=[a-z_]\w*\s*(\.\s*-?\d+\s*)?:)")
_PRIORITY = re.compile(r"(?m)^([ \t]*[A-Za-z_]\w*)\s*\.\s*-?\d+\s*:")


def grammar_to_lark(text: str, special_ids: Mapping[str, int]) -> str:
    """Lark, with a rule `start:`, or GBNF, with a rule `root ::=`. Raises ValueError."""
    if not _LARK_START.search(text):
        return gbnf_to_lark(text, special_ids)
    return _PRIORITY.sub(r"\1:", _MODIFIER.sub(r"\1", text))


def regex_to_lark(regex: str) -> str:
    """The regex has to match the whole text. \\d, \\w and their complements are restricted to ASCII, as in JavaScript
    and in JSON schemas."""
    from llguidance._lib import regex_to_lark

    return regex_to_lark(regex, "dw")

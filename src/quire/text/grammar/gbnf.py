r"""Converts GBNF, llama.cpp's notation for grammars, into llguidance's Lark.

`root ::= ...`; "text" or 'text' and sets of characters `[^a-z]`, with the escapes \n \r \t \\ \" \' \[ \] \- \^ \xHH
\uHHHH \UHHHHHHHH; `.` (any character), ( ), |, * + ? {n} {n,} {n,m}; tokens `<[id]>`, `<name>` and, for any other,
`!<[id]>` and `!<name>`; # comments.

A rule without recursion becomes a terminal: llguidance matches it as one regex, greedily."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

MAX_NESTING = 200  # of groups
MAX_REPEAT = 100_000

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<rule>[a-zA-Z0-9_-]+)[ \t\r\n]*::=
    |(?P<name>[a-zA-Z0-9_-]+)
    |(?P<text>"(?:[^"\\\r\n]|\\.)*"|'(?:[^'\\\r\n]|\\.)*')
    |(?P<set>\[(?:[^\]\\\r\n]|\\.)*\])
    |(?P<special>!?(?:<\[[0-9,-]+\]>|<[^<>\s\[\]]+>))
    |(?P<repeat>[*+?]|\{[ \t\r\n]*[0-9]*[ \t\r\n]*(?:,[ \t\r\n]*[0-9]*[ \t\r\n]*)?\})
    |(?P<sign>[().|])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in "\\\"'[]-^/"}}


@dataclass(slots=True)
class _Node:
    """Part of a rule. `kind`: leaf (Lark that needs no parentheses), special, ref, sequence, choice or repeat."""

    kind: str
    text: str = ""  # of a leaf or a special token; the rule of a ref; the operator of a repeat
    parts: list["_Node"] = field(default_factory=list)

    def refs(self) -> Iterator[str]:
        if self.kind == "ref":
            yield self.text
        for part in self.parts:
            yield from part.refs()

    @property
    def has_special(self) -> bool:
        return self.kind == "special" or any(part.has_special for part in self.parts)


def gbnf_to_lark(grammar: str, special_ids: Mapping[str, int] = MappingProxyType({})) -> str:
    """Raises ValueError, with the line."""
    rules = _Parser(grammar, special_ids).rules()
    if "root" not in rules:
        raise ValueError("the grammar has no rule `root`: write `root ::= ...` (GBNF) or `start: ...` (Lark)")
    for name, body in rules.items():
        for ref in body.refs():
            if ref not in rules:
                raise ValueError(f"rule `{name}` uses `{ref}`, which is not defined")
    terminals = _terminals(rules)
    names = {
        name: f"{'T' if name in terminals else 'r'}{number}" if name != "root" else "start"
        for number, name in enumerate(rules)
    }
    if "root" in terminals:
        names["root"] = "ROOT"
    lines = [f"{names[name]}: {_write(body, names)}" for name, body in rules.items()]
    return "\n".join(["%llguidance {}", *(["start: ROOT"] if "root" in terminals else []), *lines]) + "\n"


def _terminals(rules: dict[str, _Node]) -> set[str]:
    """The rules without recursion and without special tokens: those whose refs all are terminals."""
    waits = {name: set(body.refs()) for name, body in rules.items() if not body.has_special}
    users: dict[str, list[str]] = {}
    for name, refs in waits.items():
        for ref in refs:
            users.setdefault(ref, []).append(name)
    terminals: set[str] = set()
    ready = [name for name, refs in waits.items() if not refs]
    while ready:
        name = ready.pop()
        terminals.add(name)
        for user in users.get(name, ()):
            waits[user].discard(name)
            if not waits[user]:
                ready.append(user)
    return terminals


def _write(node: _Node, names: dict[str, str]) -> str:
    match node.kind:
        case "ref":
            return names[node.text]
        case "sequence":
            return " ".join(_write(part, names) for part in node.parts) or '""'
        case "choice":
            return "(" + " | ".join(_write(part, names) for part in node.parts) + ")"
        case "repeat":
            return f"({_write(node.parts[0], names)}){node.text}"
        case _:
            return node.text


class _Parser:
    def __init__(self, grammar: str, special_ids: Mapping[str, int]) -> None:
        self._grammar, self._special_ids = grammar, special_ids
        self._tokens = list(self._split())
        self._next = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._peek()[0] != "end":
            kind, name, position = self._take()
            if kind != "rule":
                raise self._error(f"expected a rule, `name ::= ...`, and not `{name}`", position)
            if name in rules:
                raise self._error(f"rule `{name}` is defined twice", position)
            rules[name] = self._choice(0)
        return rules

    def _split(self) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(self._grammar):
            match = _TOKEN.match(self._grammar, position)
            if match is None:
                raise self._error(f"cannot read `{self._grammar[position : position + 20]}`", position)
            kind = str(match.lastgroup)
            if kind != "blank":
                yield kind, match[kind], position
            position = match.end()
        yield "end", "the end", position

    def _choice(self, depth: int) -> _Node:
        if depth > MAX_NESTING:
            raise self._error(f"groups are nested deeper than {MAX_NESTING}", self._peek()[2])
        parts = [self._sequence(depth)]
        while self._peek()[1] == "|":
            self._take()
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _Node("choice", parts=parts)

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while (part := self._element(depth)) is not None:
            while self._peek()[0] == "repeat":
                part = _Node("repeat", self._repeat(), [part])
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=parts)

    def _element(self, depth: int) -> _Node | None:
        kind, text, position = self._peek()
        if kind in ("end", "rule") or text in ("|", ")"):
            if text == ")" and not depth:
                raise self._error("`)` closes nothing", position)
            return None
        self._take()
        if kind == "name":
            return _Node("ref", text)
        if kind == "text":
            return _Node("leaf", json.dumps("".join(self._characters(text[1:-1], position))))
        if kind == "set":
            return _Node("leaf", self._set(text[1:-1], position))
        if kind == "special":
            return _Node("special", self._special(text, position))
        if text == ".":
            return _Node("leaf", r"/(?s:.)/")
        if text == "(":
            inner = self._choice(depth + 1)
            if self._peek()[1] != ")":
                raise self._error("`(` is not closed", position)
            self._take()
            return inner
        raise self._error(f"`{text}` repeats nothing", position)

    def _special(self, text: str, position: int) -> str:
        if not text.startswith("!"):
            return text
        if not text.startswith("!<["):
            if text[1:] not in self._special_ids:
                raise self._error(f"`{text[1:]}` is no special token of this model", position)
            text = f"!<[{self._special_ids[text[1:]]}]>"
        return f"<[^{text[3:]}"

    def _repeat(self) -> str:
        _, text, position = self._take()
        if text in "*+?":
            return text
        low, comma, high = "".join(text[1:-1].split()).partition(",")
        if not low and not high:
            raise self._error(f"`{text}` has no number", position)
        if int(low or 0) > (int(high) if high else MAX_REPEAT) or int(high or 0) > MAX_REPEAT:
            raise self._error(f"`{text}`: the most is below the least, or above {MAX_REPEAT}", position)
        return f"{{{low or 0}{comma}{high}}}"

    def _set(self, text: str, position: int) -> str:
        """A set of characters as a regex."""
        negated = text.startswith("^")
        pieces = [match[0] for match in _ESCAPE.finditer(text[negated:])]
        characters = self._characters(text[negated:], position)
        if not characters:
            return r"/(?s:.)/" if negated else '""'
        body, index = "", 0
        while index < len(characters):
            if pieces[index + 1 : index + 2] == ["-"] and index + 2 < len(characters):
                if characters[index] > characters[index + 2]:
                    raise self._error(f"the range `{pieces[index]}-{pieces[index + 2]}` is empty", position)
                body += f"{_in_set(characters[index])}-{_in_set(characters[index + 2])}"
                index += 3
            else:
                body += _in_set(characters[index])
                index += 1
        return f"/[{'^' if negated else ''}{body}]/"

    def _characters(self, text: str, position: int) -> Sequence[str]:
        characters = []
        for match in _ESCAPE.finditer(text):
            number = match[1] or match[2] or match[3]
            if number:
                characters.append(self._character(int(number, 16), position))
            elif match[4] is None:
                characters.append(match[0])
            elif match[4] in _ESCAPED:
                characters.append(_ESCAPED[match[4]])
            else:
                raise self._error(f"there is no escape `{match[0]}`", position)
        return characters

    def _character(self, number: int, position: int) -> str:
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise self._error(f"there is no character {number:#x}", position)
        return chr(number)

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._next]

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _error(self, message: str, position: int) -> ValueError:
        return ValueError(f"{message}, in line {self._grammar.count(chr(10), 0, position) + 1}")


def _in_set(character: str) -> str:
    """A character of a set, as a number: whatever it means inside a set, it is taken for itself."""
    return character if character.isascii() and character.isalnum() else rf"\x{{{ord(character):x}}}"

"""Regular expressions as automata over characters, for telling states apart. What may follow is llguidance's to say.

Only what certainly means the same there is read; for anything else there is no automaton, and nothing is lost but
speed. The syntax is that of Rust's `regex`, with \\d and \\w about ASCII (see grammar_source.py)."""

import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

MAX_NODES = 10_000
MAX_PLACES = 256  # nodes that are looked at for one character
MAX_DEPTH = 50  # of groups within groups
MAX_REPEATED = 3  # times of times, as in (a?)*

Ranges = tuple[tuple[int, int], ...]  # of code points, first and last
CharSet = tuple[int, ...]  # code points, ascending: where it begins, where it ends, where it begins again

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (  # Unicode's White_Space
    (0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
HEX_DIGITS = {"x": 2, "u": 4}
PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class UnsupportedRegex(Exception):
    """The expression has something in it that is not read here."""


@dataclass(slots=True)
class NFANode:
    """Goes on to `follow`: with a character of the set, or for nothing if there is none."""

    characters: CharSet | None
    follow: tuple[int, ...]


class RegexAutomaton:
    """Nodes, of which the first accepts. A text can be at several at once, the places."""

    def __init__(self, expression: str) -> None:
        """Raises NotRead."""
        if len(expression) > MAX_NODES:
            raise UnsupportedRegex
        self._nodes = [NFANode((), ())]
        self.start = self._closed([_Reader(expression, self).read()])

    def add(self, characters: CharSet | None, follow: Iterable[int]) -> int:
        if len(self._nodes) == MAX_NODES:
            raise UnsupportedRegex
        self._nodes.append(NFANode(characters, tuple(follow)))
        return len(self._nodes) - 1

    def link(self, node: int, follow: Iterable[int]) -> None:
        self._nodes[node].follow = tuple(follow)

    def step(self, places: frozenset[int], character: str) -> frozenset[int]:
        """After one more character; nowhere, if the text is outside the language. Raises NotRead if it can be at too
        many places."""
        code, found = ord(character), list[int]()
        for place in places:
            node = self._nodes[place]
            if node.characters and bisect_right(node.characters, code) % 2:
                found += node.follow
        return self._closed(found)

    def _closed(self, nodes: list[int]) -> frozenset[int]:
        """And what follows for nothing. Of all these, the nodes that do not."""
        seen, left = set(nodes), nodes
        while left:
            node = self._nodes[left.pop()]
            if node.characters is None:
                new = [follow for follow in node.follow if follow not in seen]
                seen.update(new)
                left += new
                if len(seen) > MAX_PLACES:
                    raise UnsupportedRegex
        return frozenset(node for node in seen if self._nodes[node].characters is not None)


# What is read, before it has a place: an expression is put together from behind, as every part wants to know what
# follows it.
@dataclass(frozen=True, slots=True)
class _Characters:
    characters: CharSet

    def put(self, automaton: RegexAutomaton, follow: int) -> int:
        return automaton.add(self.characters, [follow])


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: list["_Part"]

    def put(self, automaton: RegexAutomaton, follow: int) -> int:
        for part in reversed(self.parts):
            follow = part.put(automaton, follow)
        return follow


@dataclass(frozen=True, slots=True)
class _Either:
    parts: list["_Part"]

    def put(self, automaton: RegexAutomaton, follow: int) -> int:
        return automaton.add(None, [part.put(automaton, follow) for part in self.parts])


@dataclass(frozen=True, slots=True)
class _Repeated:
    part: "_Part"
    least: int
    most: int | None  # None: any number

    def put(self, automaton: RegexAutomaton, follow: int) -> int:
        place = follow
        if self.most is None:
            place = automaton.add(None, [])
            automaton.link(place, [self.part.put(automaton, place), follow])
        else:
            for _ in range(self.most - self.least):
                place = automaton.add(None, [self.part.put(automaton, place), follow])
        for _ in range(self.least):
            before, place = place, self.part.put(automaton, place)
            if place == before:  # it is empty
                break
        return place


_Part = _Characters | _Sequence | _Either | _Repeated


class _Reader:
    def __init__(self, text: str, automaton: RegexAutomaton) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._automaton = automaton

    def read(self) -> int:
        """The node that the expression begins with."""
        part = self._either()
        if self._at < len(self._text):
            raise UnsupportedRegex
        return part.put(self._automaton, 0)

    # -- characters ------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        """The next character; nothing at the end."""
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at == len(self._text):
            raise UnsupportedRegex
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, text: str) -> bool:
        """Whether it comes next; then it is behind us."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    # -- parts -----------------------------------------------------------------------------------------------------

    def _either(self) -> _Part:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        return _Either(parts) if len(parts) > 1 else parts[0]

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._one()))
        return _Sequence(parts)

    def _repeated(self, part: _Part) -> _Part:
        for _ in range(MAX_REPEATED):
            if self._peek() not in ("*", "+", "?", "{"):
                return part
            least, most = self._times()
            self._skip("?")  # as few as possible: the same texts match
            part = _Repeated(part, least, most)
        raise UnsupportedRegex

    def _times(self) -> tuple[int, int | None]:
        match self._next():
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
        least = self._number()
        most: int | None = least
        if self._skip(","):
            most = None if self._peek() == "}" else self._number()
        if not self._skip("}") or (most is not None and not least <= most):
            raise UnsupportedRegex
        return least, most

    def _number(self) -> int:
        digits = ""
        while self._peek() in tuple("0123456789"):
            digits += self._next()
        if not 1 <= len(digits) <= 5:
            raise UnsupportedRegex
        return int(digits)

    def _one(self) -> _Part:
        match character := self._next():
            case "(":
                return self._group()
            case "[":
                return _Characters(self._set())
            case ".":
                return _Characters(_all_but(_set_of([(0x0A, 0x0A)])))
            case "\\":
                found = self._escaped()
                return _Characters(found if isinstance(found, tuple) else _only(found))
            case "^" | "$" | "]" | "{" | "}" | "*" | "+" | "?":
                raise UnsupportedRegex
        return _Characters(_only(character))

    def _group(self) -> _Part:
        if self._peek() == "?" and not self._skip("?:"):
            raise UnsupportedRegex
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnsupportedRegex
        part = self._either()
        self._depth -= 1
        if not self._skip(")"):
            raise UnsupportedRegex
        return part

    def _escaped(self) -> CharSet | str:
        """What stands behind a backslash: a set, or a character."""
        character = self._next()
        if (found := SETS.get(character.lower())) is not None:
            return found if character.islower() else _all_but(found)
        if (size := HEX_DIGITS.get(character)) is not None:
            digits = "".join(self._next() for _ in range(size))
            if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise UnsupportedRegex
            return chr(int(digits, 16))
        if character in CONTROLS:
            return CONTROLS[character]
        if character not in PUNCTUATION:
            raise UnsupportedRegex
        return character

    def _set(self) -> CharSet:
        """Behind the opening bracket."""
        refuses, found = self._skip("^"), list[tuple[int, int]]()
        if self._peek() == "]":
            raise UnsupportedRegex
        begin = self._at
        while not self._skip("]"):
            first = self._member(begin)
            if isinstance(first, tuple):
                found += _ranges_of(first)
            elif self._peek() == "-" and not self._text.startswith("-]", self._at):
                self._next()
                last = self._member(begin)
                if isinstance(last, tuple) or last < first:
                    raise UnsupportedRegex
                found.append((ord(first), ord(last)))
            else:
                found.append((ord(first), ord(first)))
        return _all_but(_set_of(found)) if refuses else _set_of(found)

    def _member(self, begin: int) -> CharSet | str:
        """Of a set: another set, or a character. Sets that are written within sets are not read, nor what may be meant
        to take two of them together."""
        character = self._next()
        if character == "\\":
            return self._escaped()
        dash = character == "-" and self._at - 1 > begin and self._peek() != "]"
        if character == "[" or dash or (character in "&~-" and self._peek() == character):
            raise UnsupportedRegex
        return character


def _set_of(ranges: Iterable[tuple[int, int]]) -> CharSet:
    found: list[int] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1]:
            found[-1] = max(found[-1], last + 1)
        else:
            found += first, last + 1
    return tuple(found)


def _ranges_of(characters: CharSet) -> Ranges:
    ends = characters if len(characters) % 2 == 0 else (*characters, sys.maxunicode + 1)
    return tuple((first, end - 1) for first, end in zip(ends[::2], ends[1::2], strict=True))


def _all_but(characters: CharSet) -> CharSet:
    return characters[1:] if characters[:1] == (0,) else (0, *characters)


def _only(character: str) -> CharSet:
    return (ord(character), ord(character) + 1)


SETS = {"d": _set_of(DIGITS), "w": _set_of(WORD), "s": _set_of(SPACE)}

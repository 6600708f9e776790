"""A regex as a nondeterministic automaton over characters. It tells states apart; llguidance decides what may follow.

The parser accepts only syntax that certainly means the same to llguidance. Any other regex has no automaton, and only
loses the mask cache. The syntax is that of Rust's `regex`, with \\d and \\w restricted to ASCII (see source.py)."""

import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

MAX_NODES = 10_000
MAX_ACTIVE_NODES = 256  # looked at for one character
MAX_DEPTH = 50  # of nested groups
MAX_QUANTIFIERS = 3  # in a row, as in a+?*

Ranges = tuple[tuple[int, int], ...]  # of code points, first and last
CharSet = tuple[int, ...]  # ascending code points: where the set begins, ends, begins again, ...

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
    """The regex uses syntax that this parser does not accept, or its automaton would be too large."""


@dataclass(slots=True)
class NFANode:
    """Leads to `targets` on a character of the set; without a set, on no character (an epsilon transition)."""

    characters: CharSet | None
    targets: tuple[int, ...]


class RegexAutomaton:
    """Nodes by index; node 0 accepts. A text can be at several nodes at once: the active nodes."""

    def __init__(self, regex: str) -> None:
        """Raises UnsupportedRegex."""
        if len(regex) > MAX_NODES:
            raise UnsupportedRegex
        self._nodes = [NFANode((), ())]
        self.start = self._close([_RegexParser(regex).parse().compile(self, 0)])

    def add(self, characters: CharSet | None, targets: Iterable[int]) -> int:
        if len(self._nodes) == MAX_NODES:
            raise UnsupportedRegex
        self._nodes.append(NFANode(characters, tuple(targets)))
        return len(self._nodes) - 1

    def link(self, node: int, targets: Iterable[int]) -> None:
        self._nodes[node].targets = tuple(targets)

    def step(self, active: frozenset[int], character: str) -> frozenset[int]:
        """The active nodes after one more character; none if the regex does not match. Raises UnsupportedRegex if
        there are more than MAX_ACTIVE_NODES."""
        code_point, reached = ord(character), list[int]()
        for index in active:
            node = self._nodes[index]
            if node.characters and bisect_right(node.characters, code_point) % 2:
                reached += node.targets
        return self._close(reached)

    def _close(self, nodes: list[int]) -> frozenset[int]:
        """The epsilon closure, without the nodes that have only epsilon transitions."""
        seen, stack = set(nodes), nodes
        while stack:
            node = self._nodes[stack.pop()]
            if node.characters is None:
                new = [target for target in node.targets if target not in seen]
                seen.update(new)
                stack += new
                if len(seen) > MAX_ACTIVE_NODES:
                    raise UnsupportedRegex
        return frozenset(index for index in seen if self._nodes[index].characters is not None)


# The syntax tree. It is compiled from the end to the start, because a node is created with the node after it:
# `compile` adds nodes that match the part and then lead to `target`, and returns the first of them.
@dataclass(frozen=True, slots=True)
class _CharacterClass:
    characters: CharSet

    def compile(self, automaton: RegexAutomaton, target: int) -> int:
        return automaton.add(self.characters, [target])


@dataclass(frozen=True, slots=True)
class _Concatenation:
    parts: list["_SyntaxNode"]

    def compile(self, automaton: RegexAutomaton, target: int) -> int:
        for part in reversed(self.parts):
            target = part.compile(automaton, target)
        return target


@dataclass(frozen=True, slots=True)
class _Alternation:
    parts: list["_SyntaxNode"]

    def compile(self, automaton: RegexAutomaton, target: int) -> int:
        return automaton.add(None, [part.compile(automaton, target) for part in self.parts])


@dataclass(frozen=True, slots=True)
class _Repetition:
    part: "_SyntaxNode"
    min_count: int
    max_count: int | None  # None: unbounded

    def compile(self, automaton: RegexAutomaton, target: int) -> int:
        node = target
        if self.max_count is None:
            node = automaton.add(None, [])
            automaton.link(node, [self.part.compile(automaton, node), target])
        else:
            for _ in range(self.max_count - self.min_count):
                node = automaton.add(None, [self.part.compile(automaton, node), target])
        for _ in range(self.min_count):
            after, node = node, self.part.compile(automaton, node)
            if node == after:  # the part is empty
                break
        return node


_SyntaxNode = _CharacterClass | _Concatenation | _Alternation | _Repetition


class _RegexParser:
    def __init__(self, regex: str) -> None:
        self._regex, self._position, self._depth = regex, 0, 0

    def parse(self) -> _SyntaxNode:
        root = self._alternation()
        if self._position < len(self._regex):
            raise UnsupportedRegex
        return root

    # -- characters ------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        """The next character; empty at the end."""
        return self._regex[self._position : self._position + 1]

    def _next(self) -> str:
        if self._position == len(self._regex):
            raise UnsupportedRegex
        self._position += 1
        return self._regex[self._position - 1]

    def _skip(self, text: str) -> bool:
        """Skip `text` if it comes next."""
        comes_next = self._regex.startswith(text, self._position)
        self._position += len(text) * comes_next
        return comes_next

    # -- syntax ----------------------------------------------------------------------------------------------------

    def _alternation(self) -> _SyntaxNode:
        parts = [self._concatenation()]
        while self._skip("|"):
            parts.append(self._concatenation())
        return _Alternation(parts) if len(parts) > 1 else parts[0]

    def _concatenation(self) -> _SyntaxNode:
        parts: list[_SyntaxNode] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repetition(self._atom()))
        return _Concatenation(parts)

    def _repetition(self, part: _SyntaxNode) -> _SyntaxNode:
        for _ in range(MAX_QUANTIFIERS):
            if self._peek() not in ("*", "+", "?", "{"):
                return part
            min_count, max_count = self._quantifier()
            self._skip("?")  # lazy: the same texts match
            part = _Repetition(part, min_count, max_count)
        raise UnsupportedRegex

    def _quantifier(self) -> tuple[int, int | None]:
        match self._next():
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
        min_count = self._number()
        max_count: int | None = min_count
        if self._skip(","):
            max_count = None if self._peek() == "}" else self._number()
        if not self._skip("}") or (max_count is not None and not min_count <= max_count):
            raise UnsupportedRegex
        return min_count, max_count

    def _number(self) -> int:
        digits = ""
        while self._peek() in tuple("0123456789"):
            digits += self._next()
        if not 1 <= len(digits) <= 5:
            raise UnsupportedRegex
        return int(digits)

    def _atom(self) -> _SyntaxNode:
        match character := self._next():
            case "(":
                return self._group()
            case "[":
                return _CharacterClass(self._bracketed())
            case ".":
                return _CharacterClass(_complement(_char_set([(0x0A, 0x0A)])))
            case "\\":
                escaped = self._escape()
                return _CharacterClass(escaped if isinstance(escaped, tuple) else _single(escaped))
            case "^" | "$" | "]" | "{" | "}" | "*" | "+" | "?":
                raise UnsupportedRegex
        return _CharacterClass(_single(character))

    def _group(self) -> _SyntaxNode:
        if self._peek() == "?" and not self._skip("?:"):
            raise UnsupportedRegex
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnsupportedRegex
        group = self._alternation()
        self._depth -= 1
        if not self._skip(")"):
            raise UnsupportedRegex
        return group

    def _escape(self) -> CharSet | str:
        """Parse what follows a backslash: a set, or a character."""
        character = self._next()
        if (characters := PERL_CLASSES.get(character.lower())) is not None:
            return characters if character.islower() else _complement(characters)
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

    def _bracketed(self) -> CharSet:
        """A character class, after its opening bracket."""
        negated, ranges = self._skip("^"), list[tuple[int, int]]()
        if self._peek() == "]":
            raise UnsupportedRegex
        begin = self._position
        while not self._skip("]"):
            first = self._class_item(begin)
            if isinstance(first, tuple):
                ranges += _ranges_of(first)
            elif self._peek() == "-" and not self._regex.startswith("-]", self._position):
                self._next()
                last = self._class_item(begin)
                if isinstance(last, tuple) or last < first:
                    raise UnsupportedRegex
                ranges.append((ord(first), ord(last)))
            else:
                ranges.append((ord(first), ord(first)))
        return _complement(_char_set(ranges)) if negated else _char_set(ranges)

    def _class_item(self, begin: int) -> CharSet | str:
        """A set or a character within brackets. Nested brackets and set operators (&&, --, ~~) are not supported."""
        character = self._next()
        if character == "\\":
            return self._escape()
        dash = character == "-" and self._position - 1 > begin and self._peek() != "]"
        if character == "[" or dash or (character in "&~-" and self._peek() == character):
            raise UnsupportedRegex
        return character


def _char_set(ranges: Iterable[tuple[int, int]]) -> CharSet:
    bounds: list[int] = []
    for first, last in sorted(ranges):
        if bounds and first <= bounds[-1]:
            bounds[-1] = max(bounds[-1], last + 1)
        else:
            bounds += first, last + 1
    return tuple(bounds)


def _ranges_of(characters: CharSet) -> Ranges:
    ends = characters if len(characters) % 2 == 0 else (*characters, sys.maxunicode + 1)
    return tuple((first, end - 1) for first, end in zip(ends[::2], ends[1::2], strict=True))


def _complement(characters: CharSet) -> CharSet:
    return characters[1:] if characters[:1] == (0,) else (0, *characters)


def _single(character: str) -> CharSet:
    return (ord(character), ord(character) + 1)


PERL_CLASSES = {"d": _char_set(DIGITS), "w": _char_set(WORD), "s": _char_set(SPACE)}

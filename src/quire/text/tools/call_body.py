"""What stands between the markers of one call: a head with its name, then arguments. Parsed incrementally."""

import re
from typing import Protocol

from quire.text.tools.parser import CallDelta

MAX_HEAD = 256  # characters; what has no name within them is no call
_MAX_LOOKAHEAD = 64  # characters that the regex of a head looks at after it


class CallBody(Protocol):
    """Begins after the marker that opens a call. `push` until `done` or `broken`; a call that is `named` is one."""

    named: bool
    done: bool
    broken: bool
    num_calls: int
    raw: str  # the text so far, until the call is named

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """The new deltas, and the text after the end."""


class HeadedBody:
    """A call whose name stands in its head. Subclasses read the arguments."""

    def __init__(self, index: int, head: re.Pattern[str]) -> None:
        """`head` has to end where its match cannot grow any more."""
        self._index, self._head = index, head
        self.named = self.done = self.broken = False
        self.num_calls = 1
        self.raw = ""

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        deltas: list[CallDelta] = []
        if not self.named:
            self.raw += text
            match = self._head.match(self.raw)
            if match is None or match.end() > MAX_HEAD:
                self.broken = len(self.raw) > MAX_HEAD + _MAX_LOOKAHEAD
                return deltas, ""
            groups = match.groupdict()
            name = groups["name"].strip()
            if not name:
                self.broken = True
                return deltas, ""
            self._begin(name)
            deltas.append(CallDelta(self._index, name, id=groups.get("id") or ""))
            self.named, text = True, self.raw[match.end() :]
        arguments, rest = self._arguments(text)
        if arguments:
            deltas.append(CallDelta(self._index, "", arguments))
        return deltas, rest

    def _begin(self, name: str) -> None:
        """The name is known."""

    def _arguments(self, text: str) -> tuple[str, str]:
        """The arguments that `text` adds, and the text after their end."""
        raise NotImplementedError


class JsonBody(HeadedBody):
    """The arguments are a JSON object, passed on as it was written."""

    def __init__(self, index: int, head: re.Pattern[str]) -> None:
        super().__init__(index, head)
        self._depth = 0
        self._in_string = self._escape = False

    def _arguments(self, text: str) -> tuple[str, str]:
        if not self._depth:
            text = text.lstrip()
            if text and text[0] != "{":
                self.done = True
                return "{}", text
        for index, char in enumerate(text):
            if self._escape:
                self._escape = False
            elif self._in_string:
                self._escape = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return text[: index + 1], text[index + 1 :]
        return text, ""

"""Calls that are parsed when the marker at their end has come: only then they are known to be calls."""

from collections.abc import Callable

from quire.text.tools.parser import CallDelta, Schemas

Parse = Callable[[str, Schemas], list[tuple[str, str]]]  # (name, arguments) of each call; none: the text has no calls


class WholeBody:
    def __init__(self, index: int, end: str, parse: Parse, schemas: Schemas) -> None:
        self._index, self._end, self._parse, self._schemas = index, end, parse, schemas
        self.named = self.done = self.broken = False
        self.num_calls = 0
        self.raw = ""

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        searched = max(len(self.raw) - len(self._end), 0)
        self.raw += text
        end = self.raw.find(self._end, searched)
        if end < 0:
            return [], ""
        inner, rest = self.raw[:end], self.raw[end + len(self._end) :]
        self.raw = self.raw[: len(self.raw) - len(rest)]
        calls = self._parse(inner, self._schemas)
        self.num_calls = len(calls)
        self.named = self.done = bool(calls)
        self.broken = not calls
        return [CallDelta(self._index + number, *call) for number, call in enumerate(calls)], rest

"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each."""

import re

from quire.text.markers import MarkerScanner
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import CallDelta, ToolFormat, ToolParserOutput

BEGIN = "[TOOL_CALLS]"

_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\]\s*)?")


class MistralToolParser:
    """Which of the two forms it is, the first character after the marker tells."""

    def __init__(self) -> None:
        self._opening = MarkerScanner(BEGIN)
        self._opened = ""  # the marker, with the white space around it
        self._calls: JsonToolParser | MistralNamedCalls | None = None

    def push(self, text: str) -> ToolParserOutput:
        found = ToolParserOutput()
        if not self._opened:
            before, rest = self._opening.push(text)
            found.content = before if rest is None else before.rstrip()
            if rest is None:
                return found
            self._opened, text = before[len(found.content) :] + BEGIN, rest
        if self._calls is None:
            start = text.lstrip()
            self._opened += text[: len(text) - len(start)]
            if not start:
                return found
            self._calls = JsonToolParser(opened=self._opened) if start[0] in "[{" else MistralNamedCalls(self._opened)
            text = start
        more = self._calls.push(text)
        found.content += more.content
        found.calls += more.calls
        return found

    def flush(self) -> ToolParserOutput:
        if self._calls is not None:
            return self._calls.flush()
        return ToolParserOutput(self._opened or self._opening.flush())


class MistralNamedCalls:
    """`name[ARGS]{...}` or `name{...}`, again after each further `[TOOL_CALLS]`."""

    def __init__(self, opened: str) -> None:
        self._opened = opened  # what came before the name, for the case that it is none
        self._name: str | None = ""  # None while arguments are read
        self._plain = False  # it was no call, and nor is what follows
        self._num_calls = 0
        self._next = MarkerScanner(BEGIN)

    def push(self, text: str) -> ToolParserOutput:
        found = ToolParserOutput()
        rest: str | None = text
        while rest:
            if self._plain:
                found.content += rest
                break
            rest = self._read_name(rest, found) if self._name is not None else self._read_arguments(rest, found)
        return found

    def flush(self) -> ToolParserOutput:
        if self._name is None:
            held = self._next.flush().rstrip()
            return ToolParserOutput(calls=[CallDelta(self._num_calls - 1, "", held)] if held else [])
        return ToolParserOutput("" if self._plain else self._opened + self._name)

    def _read_name(self, text: str, found: ToolParserOutput) -> str | None:
        name, brace, rest = ((self._name or "") + text).partition("{")
        if not brace:
            self._name = name
            return None
        if not (known := _NAME.fullmatch(name)):
            self._plain = True
            return self._opened + name + brace + rest
        found.calls.append(CallDelta(self._num_calls, known[1]))
        self._num_calls += 1
        self._name, self._opened = None, BEGIN
        return brace + rest

    def _read_arguments(self, text: str, found: ToolParserOutput) -> str | None:
        gained, rest = self._next.push(text)
        if rest is not None:
            gained, self._name = gained.rstrip(), ""
        if gained:
            found.calls.append(CallDelta(self._num_calls - 1, "", gained))
        return rest


FORMAT = ToolFormat(MistralToolParser, signs=(BEGIN,), keep_special=True, short_ids=True)

"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each."""

import re

from quire.text.markers import MarkerScanner
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import CallDelta, ToolFormat, ToolParserOutput

BEGIN = "[TOOL_CALLS]"

_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\]\s*)?")


class MistralToolParser:
    """The first character after the marker says which of the two forms it is."""

    def __init__(self) -> None:
        self._opening = MarkerScanner(BEGIN)
        self._opened = ""  # the marker, with the white space around it
        self._calls: JsonToolParser | MistralNamedCalls | None = None

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        if not self._opened:
            before, rest = self._opening.push(text)
            output.content = before if rest is None else before.rstrip()
            if rest is None:
                return output
            self._opened, text = before[len(output.content) :] + BEGIN, rest
        if self._calls is None:
            start = text.lstrip()
            self._opened += text[: len(text) - len(start)]
            if not start:
                return output
            self._calls = JsonToolParser(opened=self._opened) if start[0] in "[{" else MistralNamedCalls(self._opened)
            text = start
        calls_output = self._calls.push(text)
        output.content += calls_output.content
        output.calls += calls_output.calls
        return output

    def flush(self) -> ToolParserOutput:
        if self._calls is not None:
            return self._calls.flush()
        return ToolParserOutput(self._opened or self._opening.flush())


class MistralNamedCalls:
    """`name[ARGS]{...}` or `name{...}`, again after each further `[TOOL_CALLS]`."""

    def __init__(self, opened: str) -> None:
        self._opened = opened  # the text before the name, which is content if there is no call
        self._name: str | None = ""  # None while arguments are parsed
        self._plain = False  # there was no call: all text is content
        self._num_calls = 0
        self._next = MarkerScanner(BEGIN)

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        rest: str | None = text
        while rest:
            if self._plain:
                output.content += rest
                break
            rest = self._parse_name(rest, output) if self._name is not None else self._parse_arguments(rest, output)
        return output

    def flush(self) -> ToolParserOutput:
        if self._name is None:
            held = self._next.flush().rstrip()
            return ToolParserOutput(calls=[CallDelta(self._num_calls - 1, "", held)] if held else [])
        return ToolParserOutput("" if self._plain else self._opened + self._name)

    def _parse_name(self, text: str, output: ToolParserOutput) -> str | None:
        name, brace, rest = ((self._name or "") + text).partition("{")
        if not brace:
            self._name = name
            return None
        if not (match := _NAME.fullmatch(name)):
            self._plain = True
            return self._opened + name + brace + rest
        output.calls.append(CallDelta(self._num_calls, match[1]))
        self._num_calls += 1
        self._name, self._opened = None, BEGIN
        return brace + rest

    def _parse_arguments(self, text: str, output: ToolParserOutput) -> str | None:
        arguments, rest = self._next.push(text)
        if rest is not None:
            arguments, self._name = arguments.rstrip(), ""
        if arguments:
            output.calls.append(CallDelta(self._num_calls - 1, "", arguments))
        return rest


FORMAT = ToolFormat(MistralToolParser, template_markers=(BEGIN,), begins=(BEGIN,), keep_special=True, short_ids=True)

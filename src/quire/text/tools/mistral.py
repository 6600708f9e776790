"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each, with a
`[CALL_ID]` before the arguments in some models."""

import re

from quire.text.markers import MarkerScanner
from quire.text.tools.call_body import JsonBody
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.marked_parser import CallMarkers, MarkedToolParser
from quire.text.tools.parser import ToolParser, ToolParserOutput

BEGIN = "[TOOL_CALLS]"

_HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class MistralToolParser:
    """The first character after the marker says which of the two forms it is."""

    def __init__(self) -> None:
        self._opening = MarkerScanner(BEGIN)
        self._opened = ""  # the marker, with the white space around it
        self._calls: ToolParser | None = None

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
            if start[0] in "[{":
                self._calls, text = JsonToolParser(opened=self._opened), start
            else:
                self._calls = MarkedToolParser(CallMarkers(BEGIN), lambda index: JsonBody(index, _HEAD))
                text = self._opened + start
        calls_output = self._calls.push(text)
        output.content += calls_output.content
        output.calls += calls_output.calls
        return output

    def flush(self) -> ToolParserOutput:
        if self._calls is not None:
            return self._calls.flush()
        return ToolParserOutput(self._opened or self._opening.flush())

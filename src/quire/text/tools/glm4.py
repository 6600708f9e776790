"""The completion is the name of a function, and its arguments in the next line: GLM-4."""

import re

from quire.text.tools.call_body import JsonBody
from quire.text.tools.parser import Schemas, ToolParserOutput

_HEAD = re.compile(r"(?P<name>\S+)[ \t]*\n\s*(?=\{)")


class Glm4ToolParser:
    """There is no marker: only the names of tools tell a call from an answer that has one line and then JSON."""

    def __init__(self, schemas: Schemas) -> None:
        self._names = frozenset(schemas)
        self._call: JsonBody | None = JsonBody(0, _HEAD)  # None: all text is content
        self._start = ""
        self._trim = False  # only white space came since the call

    def push(self, text: str) -> ToolParserOutput:
        if self._call is None:
            return ToolParserOutput(self._trimmed(text))
        if not self._call.named:
            self._start += text
            text = self._start.lstrip()
            if not self._may_be_call(text):
                self._call = None
                return ToolParserOutput(self._start)
            self._call = JsonBody(0, _HEAD)
        deltas, rest = self._call.push(text)
        if self._call.done:
            self._call, self._trim = None, True
        return ToolParserOutput(self._trimmed(rest), deltas)

    def flush(self) -> ToolParserOutput:
        return ToolParserOutput("" if self._call is None or self._call.named else self._start)

    def _trimmed(self, text: str) -> str:
        text = text.lstrip() if self._trim else text
        self._trim = self._trim and not text
        return text

    def _may_be_call(self, text: str) -> bool:
        line, newline, rest = text.partition("\n")
        if not newline:
            return any(name.startswith(line.rstrip()) for name in self._names)
        return line.rstrip() in self._names and rest.lstrip()[:1] in ("", "{")

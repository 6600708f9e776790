"""`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`: Qwen3-Coder.

A value is bare text; whether `3` is a number, the tool's schema would say. It is taken as JSON where it is JSON."""

import json
import re

from quire.text.markers import MarkerScanner
from quire.text.tools.parser import CallDelta, ToolFormat, ToolParserOutput

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderToolParser:
    """A parameter is told when it is complete."""

    def __init__(self) -> None:
        self._opening = MarkerScanner("<tool_call>")
        self._opened = False
        self._raw = ""  # how it was opened, with the white space before
        self._text = ""  # of the call that is open, from its last parameter on
        self._told = False
        self._num_parameters = 0
        self._index = 0

    def push(self, text: str) -> ToolParserOutput:
        found = ToolParserOutput()
        rest: str | None = text
        while rest:
            if not self._opened:
                before, rest = self._opening.push(rest)
                shown = before if rest is None else before.rstrip()
                found.content += shown
                if rest is None:
                    break
                self._raw = before[len(shown) :] + self._opening.marker
                self._opened, self._told, self._num_parameters, self._text = True, False, 0, ""
            self._text += rest
            rest = self._read(found)
        return found

    def flush(self) -> ToolParserOutput:
        if not self._opened:
            held = self._opening.flush()
            return ToolParserOutput("" if self._index and held.isspace() else held)
        return ToolParserOutput() if self._told else ToolParserOutput(self._raw + self._text)

    def _read(self, found: ToolParserOutput) -> str | None:
        """Reads what is complete of the open call, and returns what follows its end."""
        if not self._told:
            name = _FUNCTION.search(self._text)
            if not name:
                return None
            found.calls.append(CallDelta(self._index, name[1].strip()))
            self._told, self._text = True, self._text[name.end() :]
        end = self._text.find("</tool_call>")
        body = self._text if end < 0 else self._text[:end]
        last = 0
        for parameter in _PARAMETER.finditer(body):
            before = ", " if self._num_parameters else "{"
            pair = f"{json.dumps(parameter[1].strip())}: {_as_json(parameter[2])}"
            found.calls.append(CallDelta(self._index, "", before + pair))
            self._num_parameters += 1
            last = parameter.end()
        if end < 0:
            self._text = self._text[last:]
            return None
        found.calls.append(CallDelta(self._index, "", "}" if self._num_parameters else "{}"))
        rest = self._text[end + len("</tool_call>") :]
        self._opened, self._index = False, self._index + 1
        return rest


def _as_json(text: str) -> str:
    try:
        json.loads(text)
        return text
    except ValueError:
        return json.dumps(text, ensure_ascii=False)


FORMAT = ToolFormat(Qwen3CoderToolParser, signs=("<function=",))

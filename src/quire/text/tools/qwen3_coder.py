"""`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`: Qwen3-Coder.

A value is bare text: only the tool's schema says whether `3` is a number. A value that is JSON is taken as JSON."""

import json
import re

from quire.text.markers import MarkerScanner
from quire.text.tools.parser import CallDelta, ToolFormat, ToolParserOutput

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderToolParser:
    """A parameter is emitted when it is complete."""

    def __init__(self) -> None:
        self._opening = MarkerScanner("<tool_call>")
        self._opened = False
        self._raw = ""  # the opening marker, with the white space before it
        self._text = ""  # of the open call, after its last parsed parameter
        self._named = False  # whether the open call has its name
        self._num_parameters = 0
        self._index = 0

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        rest: str | None = text
        while rest:
            if not self._opened:
                before, rest = self._opening.push(rest)
                shown = before if rest is None else before.rstrip()
                output.content += shown
                if rest is None:
                    break
                self._raw = before[len(shown) :] + self._opening.marker
                self._opened, self._named, self._num_parameters, self._text = True, False, 0, ""
            self._text += rest
            rest = self._parse_call(output)
        return output

    def flush(self) -> ToolParserOutput:
        if not self._opened:
            held = self._opening.flush()
            return ToolParserOutput("" if self._index and held.isspace() else held)
        return ToolParserOutput() if self._named else ToolParserOutput(self._raw + self._text)

    def _parse_call(self, output: ToolParserOutput) -> str | None:
        """Parse what is complete of the open call. The text after its end; None before the end."""
        if not self._named:
            name = _FUNCTION.search(self._text)
            if not name:
                return None
            output.calls.append(CallDelta(self._index, name[1].strip()))
            self._named, self._text = True, self._text[name.end() :]
        end = self._text.find("</tool_call>")
        body = self._text if end < 0 else self._text[:end]
        last = 0
        for parameter in _PARAMETER.finditer(body):
            before = ", " if self._num_parameters else "{"
            pair = f"{json.dumps(parameter[1].strip())}: {_as_json(parameter[2])}"
            output.calls.append(CallDelta(self._index, "", before + pair))
            self._num_parameters += 1
            last = parameter.end()
        if end < 0:
            self._text = self._text[last:]
            return None
        output.calls.append(CallDelta(self._index, "", "}" if self._num_parameters else "{}"))
        rest = self._text[end + len("</tool_call>") :]
        self._opened, self._index = False, self._index + 1
        return rest


def _as_json(text: str) -> str:
    try:
        json.loads(text)
        return text
    except ValueError:
        return json.dumps(text, ensure_ascii=False)


FORMAT = ToolFormat(Qwen3CoderToolParser, template_markers=("<function=",), begins=("<tool_call>",))

"""Calls between markers, in text that arrives in pieces: content, then calls, alone or within a section of them."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.text.markers import MarkerScanner, partial_marker
from quire.text.tools.call_body import CallBody
from quire.text.tools.parser import ToolParserOutput


@dataclass(frozen=True, slots=True)
class CallMarkers:
    begin: str  # opens a call
    end: str = ""  # closes a call, after its body; what stands between is dropped
    section: str = ""  # opens a section of calls; calls without one are taken as well
    section_end: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.begin)))


class MarkedToolParser:
    """`body` makes the parser of what follows `begin`, for the call of an index."""

    def __init__(self, markers: CallMarkers, body: Callable[[int], CallBody]) -> None:
        self._markers, self._new_body = markers, body
        self._opening = MarkerScanner(*markers.begins)
        self._parse = self._parse_content
        self._text = ""  # not parsed yet
        self._raw = ""  # parsed since content ended, until a call is named: it may become content
        self._body: CallBody = body(0)
        self._num_calls = 0
        self._after_call = False  # the section has a call

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        self._text += text
        while self._text and self._parse(output):
            pass
        return output

    def flush(self) -> ToolParserOutput:
        output = ToolParserOutput()
        if self._parse == self._parse_body and not self._body.named:
            output.content = self._raw + self._body.raw
        elif self._parse == self._parse_content:
            held = self._opening.flush()
            output.content = "" if self._num_calls and held.isspace() else held
        elif self._parse == self._parse_between:
            rest = self._text if self._after_call else self._raw + self._text
            output.content = "" if self._num_calls and rest.isspace() else rest
        self._text = ""
        return output

    # The states of the parser. Each method returns whether it made progress.

    def _parse_content(self, output: ToolParserOutput) -> bool:
        before, rest = self._opening.push(self._text)
        self._text = rest or ""
        if rest is None:
            output.content += before
            return False
        shown = before.rstrip()
        output.content += shown
        self._raw, self._after_call = before[len(shown) :] + self._opening.marker, False
        self._parse = self._parse_between
        if self._opening.marker == self._markers.begin:
            self._open_call()
        return True

    def _open_call(self) -> None:
        self._body, self._parse = self._new_body(self._num_calls), self._parse_body

    def _parse_between(self, output: ToolParserOutput) -> bool:
        """In a section, or after a call: white space, then a call or the end of the section."""
        rest = self._text.lstrip()
        if rest.startswith(self._markers.begin):
            self._take(self._markers.begin)
            self._open_call()
        elif self._markers.section_end and rest.startswith(self._markers.section_end):
            self._take(self._markers.section_end)
            self._end_section(output)
        elif self._markers.begin.startswith(rest) or self._markers.section_end.startswith(rest):
            return False
        else:
            self._end_section(output)
        return True

    def _take(self, marker: str) -> None:
        size = self._text.index(marker) + len(marker)
        self._raw, self._text = self._raw + self._text[:size], self._text[size:]

    def _end_section(self, output: ToolParserOutput) -> None:
        """A section without a call is content."""
        output.content += "" if self._after_call else self._raw
        self._raw, self._parse = "", self._parse_content

    def _parse_body(self, output: ToolParserOutput) -> bool:
        deltas, self._text = self._body.push(self._text)
        output.calls += deltas
        if self._body.broken:
            output.content += self._raw
            self._raw, self._parse = "", self._parse_content
            self._text = self._body.raw + self._text
        elif self._body.done:
            self._raw, self._after_call = "", True
            self._num_calls += self._body.num_calls
            self._parse = self._parse_end
        return True

    def _parse_end(self, output: ToolParserOutput) -> bool:
        """Drop what is left of a call, up to its end marker."""
        if end := self._markers.end:
            markers = tuple(filter(None, (end, *self._markers.begins, self._markers.section_end)))
            begins = [begin for marker in markers if (begin := self._text.find(marker)) >= 0]
            if not begins:
                self._text = self._text[len(self._text) - partial_marker(self._text, *markers) :]
                return False
            self._text = self._text[min(begins) :].removeprefix(end)
        self._parse = self._parse_between
        return True

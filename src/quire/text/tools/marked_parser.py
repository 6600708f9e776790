"""Calls between markers, in text that arrives in pieces: content, then calls, alone or within a section of them."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.text.markers import partial_marker
from quire.text.tools.call_body import CallBody
from quire.text.tools.parser import ToolParserOutput
from quire.text.tools.sectioned_parser import SectionedParser


@dataclass(frozen=True, slots=True)
class CallMarkers:
    begin: str  # opens a call
    end: str = ""  # closes a call, after its body; what stands between is dropped
    section: str = ""  # opens a section of calls; calls without one are taken as well
    section_end: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.begin)))


class MarkedToolParser(SectionedParser):
    """`body` makes the parser of what follows `begin`, for the call of an index."""

    def __init__(self, markers: CallMarkers, body: Callable[[int], CallBody]) -> None:
        super().__init__(*markers.begins)
        self._markers, self._new_body = markers, body
        self._parse = self._parse_content
        self._body: CallBody = body(0)

    def flush(self) -> ToolParserOutput:
        output = ToolParserOutput()
        if self._parse == self._parse_body and not self._body.named:
            output.content = self._raw + self._body.raw
        elif self._parse == self._parse_content:
            output.content = self._content_at_end()
        elif self._parse == self._parse_between:
            output.content = self._without_space(self._text if self._has_call else self._raw + self._text)
        self._text = ""
        return output

    # The states of the parser. Each method returns whether it made progress.

    def _parse_content(self, output: ToolParserOutput) -> bool:
        is_open = super()._parse_content(output)
        if is_open and self._opening.marker == self._markers.begin:
            self._open_call()
        return is_open

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
        output.content += "" if self._has_call else self._raw
        self._raw, self._parse = "", self._parse_content

    def _parse_body(self, output: ToolParserOutput) -> bool:
        deltas, self._text = self._body.push(self._text)
        output.calls += deltas
        if self._body.broken:
            output.content += self._raw
            self._raw, self._parse = "", self._parse_content
            self._text = self._body.raw + self._text
        elif self._body.done:
            self._raw, self._has_call = "", True
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

"""What parsers of marked sections share: content is passed on until a marker opens a section of calls."""

from collections.abc import Callable

from quire.text.markers import MarkerScanner
from quire.text.tools.parser import ToolParserOutput


class SectionedParser:
    """A state machine. `_parse` is its state: a method that takes what it can from the begin of `_text`, and returns
    whether it made progress."""

    _parse: Callable[[ToolParserOutput], bool]

    def __init__(self, *begins: str) -> None:
        """`begins`: the markers that open a section."""
        self._opening = MarkerScanner(*begins)
        self._text = ""  # not parsed yet
        self._raw = ""  # parsed since the section began, until its first call is named: it may become content
        self._has_call = False  # whether the section has a named call
        self._num_calls = 0  # of all sections

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        self._text += text
        while self._text and self._parse(output):
            pass
        return output

    def _parse_content(self, output: ToolParserOutput) -> bool:
        before, rest = self._opening.push(self._text)
        self._text = rest or ""
        if rest is None:
            output.content += before
            return False
        shown = before.rstrip()
        output.content += shown
        self._raw, self._has_call = before[len(shown) :] + self._opening.marker, False
        self._parse = self._parse_between
        return True

    def _parse_between(self, output: ToolParserOutput) -> bool:
        """In a section, before a call or behind one."""
        raise NotImplementedError

    def _content_at_end(self) -> str:
        """What the search for a marker held back. White space behind calls is no content."""
        return self._without_space(self._opening.flush())

    def _without_space(self, content: str) -> str:
        return "" if self._num_calls and content.isspace() else content

"""Calls as JSON between markers: one object, several after each other, or a list of them."""

from quire.text.tools.json_call import JsonCallReader
from quire.text.tools.parser import ToolParserOutput
from quire.text.tools.sectioned_parser import SectionedParser

_SEPARATORS = " \t\r\n[],;"  # may stand between calls: the brackets and commas of a list


class JsonToolParser(SectionedParser):
    """`begin` opens a section of calls and `end` closes it. Without `begin`, calls start where the text does or there
    are none; without `end`, the section goes on to the end of the text."""

    def __init__(self, *begin: str, end: str = "", prefix: str = "", opened: str = "", keyed: bool = False) -> None:
        """Any of `begin` opens a section. `prefix` may stand before a call. Without `begin`, `opened` is the text that
        came before. `keyed`: see JsonCallReader."""
        super().__init__(*begin)
        self._begin, self._end, self._prefix, self._keyed = begin, end, prefix, keyed
        self._parse = self._parse_content if begin else self._parse_between
        self._raw = opened
        self._call = JsonCallReader(0, keyed)

    def flush(self) -> ToolParserOutput:
        output = ToolParserOutput()
        if self._parse == self._parse_content:
            output.content = self._content_at_end()
        elif not self._has_call:
            call = self._call.raw if self._parse == self._parse_call else ""
            output.content = self._raw + call + self._text
        self._text = ""
        return output

    # The states of the parser. Each method returns whether it made progress.

    def _parse_between(self, output: ToolParserOutput) -> bool:
        """Separators, then a call, the end marker or the prefix."""
        rest = self._text.lstrip(_SEPARATORS)
        if rest.startswith("{"):
            self._take(len(self._text) - len(rest))
            self._call, self._parse = JsonCallReader(self._num_calls, self._keyed), self._parse_call
            return True
        for marker in filter(None, (self._prefix, self._end)):
            if rest.startswith(marker):
                self._take(len(self._text) - len(rest) + len(marker))
                if marker == self._end:
                    self._close(output)
                return True
            if marker.startswith(rest):
                return False
        if rest and self._has_call and self._end:
            self._parse = self._skip_to_end
        elif rest:
            separators = self._text[: len(self._text) - len(rest)] if self._has_call else ""
            self._text = self._text[separators.rfind("]") + 1 :]
            self._parse = self._reject
        return bool(rest)

    def _parse_call(self, output: ToolParserOutput) -> bool:
        deltas, self._text = self._call.push(self._text)
        output.calls += deltas
        if deltas and not self._has_call:
            self._has_call, self._raw = True, ""
        if self._call.done or (self._call.broken and self._call.named):
            self._num_calls += 1
            self._parse = self._parse_between
        elif self._call.broken:
            self._raw += self._call.raw
            self._parse = self._reject
        return True

    def _skip_to_end(self, output: ToolParserOutput) -> bool:
        """Drop what follows a call and belongs to none, such as a bracket too many, up to the end marker."""
        index = self._text.find(self._end)
        self._text = self._text[index:] if index >= 0 else self._text[-len(self._end) :]
        if index >= 0:
            self._parse = self._parse_between
        return index >= 0

    def _reject(self, output: ToolParserOutput) -> bool:
        """What looked like a call is none: it is content, and so is what follows."""
        output.content += self._raw
        self._raw = ""
        if self._begin:
            self._parse = self._parse_content
            return True
        output.content += self._text
        self._text = ""
        return False

    def _take(self, size: int) -> None:
        if not self._has_call:
            self._raw += self._text[:size]
        self._text = self._text[size:]

    def _close(self, output: ToolParserOutput) -> None:
        if not self._has_call:
            output.content += self._raw
        self._raw = ""
        if self._begin:
            self._parse = self._parse_content

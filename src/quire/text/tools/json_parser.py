"""Calls as JSON between markers: one object, several after each other, or a list of them."""

from quire.text.markers import MarkerScanner
from quire.text.tools.json_call import JsonCallReader
from quire.text.tools.parser import ToolParserOutput

_BETWEEN = " \t\r\n[],;"  # what may stand between calls: the brackets and commas of a list


class JsonToolParser:
    """`begin` opens calls and `end` closes them. Without `begin` the calls begin where the text does, or there are
    none; without `end` they go on to the end of the text."""

    def __init__(self, begin: str = "", end: str = "", *, prefix: str = "", opened: str = "") -> None:
        """Where there is no `begin`: `prefix` may stand before the first call, and `opened` is what came before."""
        self._end, self._prefix = end, prefix
        self._opening = MarkerScanner(begin) if begin else None
        self._read = self._content if begin else self._between
        self._text = ""  # what is still to be read
        self._raw = opened  # what was read since the calls were opened, until one of them is told
        self._told = False  # whether one was, since then
        self._num_calls = 0
        self._call = JsonCallReader(0)

    def push(self, text: str) -> ToolParserOutput:
        found = ToolParserOutput()
        self._text += text
        while self._text and self._read(found):
            pass
        return found

    def flush(self) -> ToolParserOutput:
        found = ToolParserOutput()
        if self._read == self._content:
            assert self._opening is not None
            held = self._opening.flush()
            found.content = "" if self._num_calls and held.isspace() else held
        elif not self._told:
            call = self._call.raw if self._read == self._in_call else ""
            found.content = self._raw + call + self._text
        self._text = ""
        return found

    # What is being read. Each returns whether it came further.

    def _content(self, found: ToolParserOutput) -> bool:
        assert self._opening is not None
        before, rest = self._opening.push(self._text)
        self._text = rest or ""
        if rest is None:
            found.content += before
            return False
        shown = before.rstrip()
        found.content += shown
        self._raw, self._told, self._read = before[len(shown) :] + self._opening.marker, False, self._between
        return True

    def _between(self, found: ToolParserOutput) -> bool:
        rest = self._text.lstrip(_BETWEEN)
        if rest.startswith("{"):
            self._take(len(self._text) - len(rest))
            self._call, self._read = JsonCallReader(self._num_calls), self._in_call
            return True
        for marker in filter(None, (self._end, self._prefix)):
            if rest.startswith(marker):
                self._take(len(self._text) - len(rest) + len(marker))
                if marker == self._end:
                    self._close(found)
                return True
            if marker.startswith(rest):
                return False
        if rest:
            self._read = self._skip if self._told and self._end else self._no_call
        return bool(rest)

    def _in_call(self, found: ToolParserOutput) -> bool:
        deltas, self._text = self._call.push(self._text)
        found.calls += deltas
        if deltas and not self._told:
            self._told, self._raw = True, ""
        if self._call.done or (self._call.broken and self._call.told):
            self._num_calls += 1
            self._read = self._between
        elif self._call.broken:
            self._raw += self._call.raw
            self._read = self._no_call
        return True

    def _skip(self, found: ToolParserOutput) -> bool:
        """Something after a call that belongs to none, such as a bracket too many: over at the end marker."""
        at = self._text.find(self._end)
        self._text = self._text[at:] if at >= 0 else self._text[-len(self._end) :]
        if at >= 0:
            self._read = self._between
        return at >= 0

    def _no_call(self, found: ToolParserOutput) -> bool:
        """What looked like a call is none: it is content, and so is what follows."""
        found.content += self._raw
        self._raw = ""
        if self._opening is not None:
            self._read = self._content
            return True
        found.content += self._text
        self._text = ""
        return False

    def _take(self, size: int) -> None:
        if not self._told:
            self._raw += self._text[:size]
        self._text = self._text[size:]

    def _close(self, found: ToolParserOutput) -> None:
        if not self._told:
            found.content += self._raw
        self._raw = ""
        if self._opening is not None:
            self._read = self._content

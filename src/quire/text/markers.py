"""Finds markers such as `<tool_call>` in text that arrives in pieces."""


class MarkerScanner:
    """Passes text on until a marker is complete. Holds back what could still become one, and the white space before
    it, which is content only if no marker follows."""

    def __init__(self, *markers: str) -> None:
        assert all(markers)
        self._markers = markers
        self.marker = markers[0] if markers else ""  # the one that was last
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text before the first marker, and the text after it; None while no marker has come."""
        text = self._held + text
        begins = [(begin, -len(marker), marker) for marker in self._markers if (begin := text.find(marker)) >= 0]
        if begins:
            begin, _, self.marker = min(begins)
            self._held = ""
            return text[:begin], text[begin + len(self.marker) :]
        end = len(text[: len(text) - partial_marker(text, *self._markers)].rstrip())
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        """The text that is still held back, at the end."""
        held, self._held = self._held, ""
        return held


class MarkerFilter:
    """Passes text on without the markers in it."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""

    def push(self, text: str) -> str:
        text, shown = self._held + text, ""
        while begins := [(begin, marker) for marker in self._markers if (begin := text.find(marker)) >= 0]:
            begin, marker = min(begins)
            shown, text = shown + text[:begin], text[begin + len(marker) :]
        end = len(text) - partial_marker(text, *self._markers)
        self._held = text[end:]
        return shown + text[:end]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def partial_marker(text: str, *markers: str) -> int:
    """How many characters at the end of the text may be the begin of a marker."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0

"""Finds a marker such as `<tool_call>` in text that arrives in pieces."""


class MarkerScanner:
    """Passes text on until the marker is complete. Holds back what could still become the marker, and the white space
    before it, which is content only if no marker follows."""

    def __init__(self, marker: str) -> None:
        assert marker
        self.marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text before the marker, and the text after it; None while the marker has not come."""
        text = self._held + text
        begin = text.find(self.marker)
        if begin >= 0:
            self._held = ""
            return text[:begin], text[begin + len(self.marker) :]
        end = len(text[: len(text) - _overlap(text, self.marker)].rstrip())
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        """The text that is still held back, at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, marker: str) -> int:
    """How many characters of the marker the text ends with."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0

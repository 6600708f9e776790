"""A marker such as `<tool_call>` in a text that arrives in pieces."""


class MarkerScanner:
    """Passes text on until the marker is complete, holding back what could still become it, and white space before it:
    whether that is text or belongs to the marker, is known when the marker comes or does not."""

    def __init__(self, marker: str) -> None:
        assert marker
        self.marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text before the marker, and what follows it; None while it has not come."""
        text = self._held + text
        at = text.find(self.marker)
        if at >= 0:
            self._held = ""
            return text[:at], text[at + len(self.marker) :]
        end = len(text[: len(text) - _begun(text, self.marker)].rstrip())
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, marker: str) -> int:
    """How many characters of the marker the text ends with."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0

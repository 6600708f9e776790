"""Writes answers to stdout and notes to stderr."""

import sys
from typing import TextIO

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Terminal:
    """Writes text at once. On a terminal, control characters are shown and not executed: they come from a model, and
    must not move the cursor, set the title or answer for the user."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr

    def write(self, text: str) -> None:
        self._out.write(text.translate(_CONTROLS) if self._out.isatty() else text)
        self._out.flush()

    def note(self, text: str) -> None:
        """About the answer, not part of it: on stderr, dim."""
        self._notes.write(f"\033[2m{text}\033[0m\n" if self._notes.isatty() else f"{text}\n")
        self._notes.flush()

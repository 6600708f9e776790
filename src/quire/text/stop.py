"""Finds stop strings in text that arrives in pieces.

A Knuth-Morris-Pratt matcher for each stop string takes one character at a time, so the result does not depend on how
the text is cut into pieces. The match that ends first wins; of two that end together, the longer one."""

from collections.abc import Iterable


class StopStrings:
    """Passes text through until a stop string is complete, holding back only what could still become one."""

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._matchers = [_KMPMatcher(stop) for stop in stops]
        self._firsts = {matcher.stop[0] for matcher in self._matchers}
        self._include = include  # whether the stop string itself is returned
        self._held = ""  # the longest suffix of the text that is a prefix of a stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string if one is complete. Nothing is pushed after that."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        text = self._held + text
        for index in range(len(self._held), len(text)):
            if ended := [m.stop for m in self._matchers if m.advance(text[index])]:
                stop = max(ended, key=len)
                self._held = ""
                end = index + 1 if self._include else index + 1 - len(stop)
                return text[:end], stop
        shown = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The text that is still held back, at the end."""
        held, self._held = self._held, ""
        return held


class _KMPMatcher:
    """How many characters of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string is refused by SamplingParams"
        self.stop = stop
        self.matched = 0
        self._fallbacks = [0]  # by number of matched characters - 1; grows as far as the text has matched

    def advance(self, char: str) -> bool:
        """Take the next character of the text. True if it completes the stop string."""
        self.matched = self._step(self.matched, char)
        if self.matched > len(self._fallbacks):
            self._fallbacks.append(self._step(self._fallbacks[-1], char))
        return self.matched == len(self.stop)

    def _step(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallbacks[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0

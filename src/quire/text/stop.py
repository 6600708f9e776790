"""Stop strings in a text that arrives in pieces.

Each stop string is followed by a Knuth-Morris-Pratt matcher, one character at a time, so the answer cannot depend on
how the text was cut into pieces. The match that ends first wins; of two that end together, the longer."""

from collections.abc import Iterable


class StopStrings:
    """Passes text through until a stop string is complete, holding back only what could still become one."""

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._firsts = {matcher.stop[0] for matcher in self._matchers}
        self._include = include  # whether the stop string itself is part of the text
        self._held = ""  # the longest suffix of the text that begins some stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete: then nothing comes after it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        text = self._held + text
        for at in range(len(self._held), len(text)):
            if ended := [m.stop for m in self._matchers if m.advance(text[at])]:
                stop = max(ended, key=len)
                self._held = ""
                end = at + 1 if self._include else at + 1 - len(stop)
                return text[:end], stop
        shown = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How many characters of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string is refused by SamplingParams"
        self.stop = stop
        self.matched = 0
        self._fallbacks = [0]  # by number of matched characters, less one; grown only as far as the text has matched

    def advance(self, char: str) -> bool:
        """Take one more character of the text. True when it completes the stop string."""
        self.matched = self._step(self.matched, char)
        if self.matched > len(self._fallbacks):
            self._fallbacks.append(self._step(self._fallbacks[-1], char))
        return self.matched == len(self.stop)

    def _step(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallbacks[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0

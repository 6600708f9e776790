"""Thoughts split from the answer, in a text that arrives in pieces."""

from quire.text.markers import MarkerScanner
from quire.text.reasoning import ReasoningFormat


class ReasoningParser:
    """`push` and `flush` give what is thought and what is answer. White space beside the markers belongs to neither."""

    def __init__(self, form: ReasoningFormat, begun: bool = False) -> None:
        """`begun`: the prompt ends with the opening marker, so that the text begins with a thought."""
        self._begin = form.begin
        self._end = MarkerScanner(form.end)
        self._thinks = begun or form.always  # what it is if no marker opens it
        self._stage = "start"
        self._start = ""  # what has come while it may yet become the opening marker
        self._trim = True  # only white space came since the marker

    def push(self, text: str) -> tuple[str, str]:
        if self._stage == "start":
            self._start += text
            start = self._start.lstrip()
            if self._begin.startswith(start):
                return "", ""
            if start.startswith(self._begin):  # also where the prompt has it already
                self._thinks, text = True, start[len(self._begin) :]
            else:
                text, self._trim = self._start, self._thinks
            self._stage = "thought" if self._thinks else "answer"
        if self._stage == "answer":
            return "", self._trimmed(text)
        thought, rest = self._end.push(text)
        if rest is None:
            return self._trimmed(thought), ""
        thought = self._trimmed(thought.rstrip())
        self._stage, self._trim = "answer", True
        return thought, self._trimmed(rest)

    def flush(self) -> tuple[str, str]:
        """The text has ended. A thought that was never closed is one all the same."""
        if self._stage == "start":
            rest = "" if self._start.strip() == self._begin else self._start
            return (rest, "") if self._thinks else ("", rest)
        return self._end.flush().rstrip(), ""

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

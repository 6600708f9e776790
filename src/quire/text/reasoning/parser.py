"""Splits reasoning from the answer, in text that arrives in pieces."""

from quire.text.markers import MarkerScanner
from quire.text.reasoning import ReasoningFormat


class ReasoningParser:
    """`push` and `flush` return (reasoning, answer). White space beside the markers belongs to neither."""

    def __init__(self, reasoning_format: ReasoningFormat, begun: bool = False) -> None:
        """`begun`: the prompt ends with the opening marker, so the completion starts with reasoning."""
        self._begin = reasoning_format.begin
        self._end = MarkerScanner(reasoning_format.end)
        self._reasons = begun or reasoning_format.always  # whether text without an opening marker is reasoning
        self._stage = "start"
        self._start = ""  # text that may yet become the opening marker
        self._trim = True  # only white space came since the marker

    def push(self, text: str) -> tuple[str, str]:
        if self._stage == "start":
            self._start += text
            start = self._start.lstrip()
            if self._begin.startswith(start):
                return "", ""
            if start.startswith(self._begin):  # also after a prompt that ends with it
                self._reasons, text = True, start[len(self._begin) :]
            else:
                text, self._trim = self._start, self._reasons
            self._stage = "reasoning" if self._reasons else "answer"
        if self._stage == "answer":
            return "", self._trim_start(text)
        reasoning, rest = self._end.push(text)
        if rest is None:
            return self._trim_start(reasoning), ""
        reasoning = self._trim_start(reasoning.rstrip())
        self._stage, self._trim = "answer", True
        return reasoning, self._trim_start(rest)

    def flush(self) -> tuple[str, str]:
        """The text has ended. Reasoning without an end marker stays reasoning."""
        if self._stage == "start":
            rest = "" if self._start.strip() == self._begin else self._start
            return (rest, "") if self._reasons else ("", rest)
        return self._end.flush().rstrip(), ""

    def _trim_start(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

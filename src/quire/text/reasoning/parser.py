"""Splits reasoning from the answer, in text that arrives in pieces."""

from quire.text.markers import MarkerFilter, MarkerScanner
from quire.text.reasoning import ReasoningFormat


class ReasoningParser:
    """`push` and `flush` return (reasoning, answer). White space beside the markers belongs to neither."""

    def __init__(
        self,
        reasoning_format: ReasoningFormat,
        begun: bool = False,
        call_begins: tuple[str, ...] = (),
        exact: bool = False,
    ) -> None:
        """`begun`: the prompt ends with the opening marker, so the completion starts with reasoning. `call_begins`:
        the markers of tool calls. Reasoning is held back from the first of them on, until its end shows that it is no
        call. `exact`: all that follows reasoning is the answer, white space and markers too."""
        self._format = reasoning_format
        self._exact = exact
        self._begin = reasoning_format.begin.strip()
        self._end = MarkerScanner(reasoning_format.end, *call_begins)
        self._silent = MarkerFilter(*(() if exact else reasoning_format.silent))
        self._reasons = begun or reasoning_format.always  # whether text without an opening marker is reasoning
        self._stage = "start"
        self._start = ""  # text that may yet become the opening marker
        self._held = ""  # reasoning from the marker of a call on
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
            return "", self._trim_start(self._silent.push(text))
        return self._push_reasoning(text)

    def _push_reasoning(self, text: str) -> tuple[str, str]:
        if self._held:
            return self._search_held(text)
        reasoning, rest = self._end.push(text)
        if rest is None:
            return self._trim_start(reasoning), ""
        shown = self._trim_start(reasoning.rstrip())
        if self._end.marker == self._format.end:
            return shown, self._begin_answer(rest)
        self._held = reasoning[len(reasoning.rstrip()) :] + self._end.marker
        more, answer = self._search_held(rest)
        return shown + more, answer

    def _search_held(self, text: str) -> tuple[str, str]:
        searched = max(len(self._held) - len(self._format.end), 0)
        self._held += text
        end = self._held.find(self._format.end, searched)
        if end < 0:
            return "", ""
        reasoning, rest = self._held[:end], self._held[end + len(self._format.end) :]
        self._held = ""
        return self._trim_start(reasoning.rstrip()), self._begin_answer(rest)

    def _begin_answer(self, text: str) -> str:
        self._stage, self._trim = "answer", not self._exact
        return self._trim_start(self._silent.push(text))

    def flush(self) -> tuple[str, str]:
        """The text has ended. Reasoning without an end marker stays reasoning; see also `take_held`."""
        if self._stage == "start":
            rest = "" if self._start.strip() == self._begin else self._start
            return (rest, "") if self._reasons else ("", rest)
        if self._stage == "answer":
            return "", self._trim_start(self._silent.flush())
        return self._end.flush().rstrip(), ""

    def take_held(self) -> str:
        """After `flush`: the text from the marker of a call on, in reasoning that was never closed."""
        held, self._held = self._held, ""
        return held

    def _trim_start(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

"""Parses a model's text as it arrives into reasoning, content for the user, and tool calls."""

from dataclasses import dataclass, field

from quire.text.reasoning.parser import ReasoningParser
from quire.text.tools.parser import CallDelta, ToolParser


@dataclass(slots=True)
class AnswerDelta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    @property
    def is_content(self) -> bool:
        """Whether it has content and nothing else."""
        return bool(self.content) and not self.reasoning and not self.calls


class AnswerParser:
    """Parses one sample. Without `thoughts` and `tools` all text is content."""

    def __init__(
        self, thoughts: ReasoningParser | None = None, tools: ToolParser | None = None, parallel: bool = True
    ) -> None:
        self._thoughts, self._tools = thoughts, tools
        self._parallel = parallel  # False: only the first call counts

    def push(self, text: str, ended: bool = False) -> AnswerDelta:
        """What `text` adds; with `ended`, also what was held back until the end was known."""
        if self._thoughts is None and self._tools is None:
            return AnswerDelta("", text)
        delta = AnswerDelta()
        if text:
            self._split(delta, *(self._thoughts.push(text) if self._thoughts is not None else ("", text)))
        if ended:
            held = ""
            if self._thoughts is not None:
                self._split(delta, *self._thoughts.flush())
                held = self._thoughts.take_held()
            if self._tools is not None:
                self._end_calls(delta, self._tools, held)
        return delta

    def _split(self, delta: AnswerDelta, reasoning: str, text: str) -> None:
        delta.reasoning += reasoning
        if self._tools is None:
            delta.content += text
        elif text:
            parsed = self._tools.push(text)
            self._add(delta, parsed.content, parsed.calls)

    def _end_calls(self, delta: AnswerDelta, tools: ToolParser, held: str) -> None:
        """`held`: what may be a call in reasoning that was not closed; without a call, it is reasoning."""
        first, last = tools.push(held), tools.flush()
        calls, content = first.calls + last.calls, first.content + last.content
        if held and not calls:
            delta.reasoning += held.rstrip()
        else:
            self._add(delta, content, calls)

    def _add(self, delta: AnswerDelta, content: str, calls: list[CallDelta]) -> None:
        delta.content += content
        delta.calls += calls if self._parallel else [call for call in calls if call.index == 0]

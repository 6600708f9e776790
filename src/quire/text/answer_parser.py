"""What a model's text says, as it arrives: thoughts, text for the user, and calls of tools."""

from dataclasses import dataclass, field

from quire.text.reasoning.thoughts import Thoughts
from quire.text.tools.call import CallDelta, ToolParser


@dataclass(slots=True)
class AnswerDelta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerReader:
    """Reads one sample."""

    def __init__(self, thoughts: Thoughts | None, tools: ToolParser | None, parallel: bool = True) -> None:
        self._thoughts, self._tools = thoughts, tools
        self._parallel = parallel  # else calls after the first are left out

    def push(self, text: str) -> AnswerDelta:
        gain = AnswerDelta(content=text)
        if self._thoughts is not None:
            gain.reasoning, gain.content = self._thoughts.push(text)
        self._look_for_calls(gain)
        return gain

    def end(self) -> AnswerDelta:
        """The text has ended: what was held back."""
        gain = AnswerDelta()
        if self._thoughts is not None:
            gain.reasoning, gain.content = self._thoughts.flush()
        self._look_for_calls(gain)
        if self._tools is not None:
            last = self._tools.flush()
            gain.content += last.content
            gain.calls += self._wanted(last.calls)
        return gain

    def _look_for_calls(self, gain: AnswerDelta) -> None:
        if self._tools is not None and gain.content:
            found = self._tools.push(gain.content)
            gain.content, gain.calls = found.content, self._wanted(found.calls)

    def _wanted(self, calls: list[CallDelta]) -> list[CallDelta]:
        return calls if self._parallel else [call for call in calls if call.index == 0]

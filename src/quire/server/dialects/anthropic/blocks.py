"""An answer as blocks: a list of them when it is whole, events when it is streamed."""

from uuid import uuid4

from quire.server.dialects.answer_parser import WholeCall, whole_calls
from quire.server.dialects.anthropic.shapes import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from quire.text.answer_parser import AnswerDelta


class BlockEvents:
    """Thoughts, text and each call are blocks; one is open at a time."""

    def __init__(self) -> None:
        self.called = False
        self._index = -1
        self._open: str | None = None  # "thinking", "text", or "call"

    def gained(self, gain: AnswerDelta) -> list[object]:
        events: list[object] = []
        if gain.reasoning:
            events += self._enter("thinking", ThinkingContent())
            events.append(BlockDelta(self._index, ThinkingDelta(gain.reasoning)))
        if gain.content and (self._open == "text" or gain.content.strip()):  # white space alone is no answer
            events += self._enter("text", TextContent())
            events.append(BlockDelta(self._index, TextDelta(gain.content)))
        for call in gain.calls:
            if call.name:
                self.called = True
                events += [*self.end(), *self._enter("call", new_call(call.name))]
            if call.arguments:
                events.append(BlockDelta(self._index, InputDelta(call.arguments)))
        return events

    def end(self) -> list[object]:
        if self._open is None:
            return []
        self._open = None
        return [BlockStop(self._index)]

    def _enter(self, kind: str, block: TextContent | ThinkingContent | ToolUseContent) -> list[object]:
        if self._open == kind:
            return []
        closed = self.end()
        self._index += 1
        self._open = kind
        return [*closed, BlockStart(self._index, block)]


def whole_blocks(gain: AnswerDelta) -> list[TextContent | ThinkingContent | ToolUseContent]:
    blocks: list[TextContent | ThinkingContent | ToolUseContent] = []
    if gain.reasoning:
        blocks.append(ThinkingContent(gain.reasoning))
    if gain.content.strip():
        blocks.append(TextContent(gain.content))
    return blocks + [_call(call) for call in whole_calls(gain.calls)]


def _call(call: WholeCall) -> TextContent | ToolUseContent:
    """A call that was cut short is text: a tool could not be called so."""
    if call.arguments is None:
        return TextContent(f"{call.name}({call.written}")
    block = new_call(call.name)
    block.input = call.arguments
    return block


def new_call(name: str) -> ToolUseContent:
    return ToolUseContent(id=f"toolu_{uuid4().hex[:24]}", name=name, input={})

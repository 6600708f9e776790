"""Content blocks of an answer: a list of them, or the events of a stream."""

from uuid import uuid4

from quire.server.dialects.anthropic.shapes import (
    SIGNATURE,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    SignatureDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from quire.server.dialects.tool_calls import CompletedCall, completed_calls
from quire.text.answer_parser import AnswerDelta


class BlockEvents:
    """Reasoning, text and each tool call are blocks; one is open at a time."""

    def __init__(self, show_reasoning: bool = True) -> None:
        """Without `show_reasoning` its blocks are empty."""
        self.called = False
        self._show_reasoning = show_reasoning
        self._index = -1
        self._open: str | None = None  # "thinking", "text", or "call"

    def push(self, delta: AnswerDelta) -> list[object]:
        events: list[object] = []
        if delta.reasoning:
            events += self._enter("thinking", ThinkingContent())
            if self._show_reasoning:
                events.append(BlockDelta(self._index, ThinkingDelta(delta.reasoning)))
        if delta.content and (self._open == "text" or delta.content.strip()):  # white space alone opens no block
            events += self._enter("text", TextContent())
            events.append(BlockDelta(self._index, TextDelta(delta.content)))
        for call in delta.calls:
            if call.name:
                self.called = True
                events += [*self.end(), *self._enter("call", new_call(call.name))]
            if call.arguments:
                events.append(BlockDelta(self._index, InputDelta(call.arguments)))
        return events

    def end(self) -> list[object]:
        if self._open is None:
            return []
        signed = [BlockDelta(self._index, SignatureDelta(SIGNATURE))] if self._open == "thinking" else []
        self._open = None
        return [*signed, BlockStop(self._index)]

    def _enter(self, kind: str, block: TextContent | ThinkingContent | ToolUseContent) -> list[object]:
        if self._open == kind:
            return []
        closed = self.end()
        self._index += 1
        self._open = kind
        return [*closed, BlockStart(self._index, block)]


def content_blocks(
    delta: AnswerDelta, show_reasoning: bool = True
) -> list[TextContent | ThinkingContent | ToolUseContent]:
    blocks: list[TextContent | ThinkingContent | ToolUseContent] = []
    if delta.reasoning:
        blocks.append(ThinkingContent(delta.reasoning if show_reasoning else "", SIGNATURE))
    if delta.content.strip():
        blocks.append(TextContent(delta.content))
    return blocks + [_call(call) for call in completed_calls(delta.calls)]


def _call(call: CompletedCall) -> TextContent | ToolUseContent:
    """A call that was cut short becomes text: its arguments are not JSON."""
    if call.arguments is None:
        return TextContent(f"{call.name}({call.written}")
    block = new_call(call.name)
    block.input = call.arguments
    return block


def new_call(name: str) -> ToolUseContent:
    return ToolUseContent(id=f"toolu_{uuid4().hex[:24]}", name=name, input={})

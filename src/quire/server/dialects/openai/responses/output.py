"""The output items of a response as they grow, and the events of it."""

from typing import Any

from msgspec import structs

from quire.server.dialects.fields import new_id
from quire.server.dialects.openai.chat_call import ChatLogprob
from quire.server.dialects.openai.responses.shapes import (
    CallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from quire.server.dialects.openai.tool_calls import new_call_id
from quire.text.answer_parser import AnswerDelta
from quire.text.tools.parser import CallDelta


class ResponseOutput:
    """Only the last item can be open. Output of another kind closes it."""

    def __init__(self, short_ids: bool = False) -> None:
        self.items: list[OutputItem] = []
        self._open = False
        self._short_ids = short_ids

    @property
    def reasoning(self) -> str:
        return "".join(item.content[0].text for item in self.items if isinstance(item, ReasoningItem))

    def push(self, answer: AnswerDelta, logprobs: list[ChatLogprob] | None = None) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if answer.reasoning:
            self._think(answer.reasoning, events)
        if answer.content or (logprobs and not answer.reasoning and not answer.calls):
            self._say(answer.content, logprobs or [], events)
        for delta in answer.calls:
            self._write_call(delta, events)
        return events

    def empty(self) -> list[ResponseEvent]:
        """An empty message, for a model that generated no text."""
        events: list[ResponseEvent] = []
        self._say("", [], events)
        return events

    def end(self, status: str = "completed") -> list[ResponseEvent]:
        """`status`: of the open item."""
        events: list[ResponseEvent] = []
        self._close(events, status)
        return events

    def _think(self, text: str, events: list[ResponseEvent]) -> None:
        item = self._current()
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(id=new_id("rs", "_"), content=[ReasoningText()])
            self._begin(item, events)
        item.content[0].text += text
        events.append(self._event("reasoning_text.delta", item.id, content_index=0, delta=text))

    def _say(self, text: str, logprobs: list[ChatLogprob], events: list[ResponseEvent]) -> None:
        item = self._current()
        if not isinstance(item, MessageItem):
            item = MessageItem(id=new_id("msg", "_"), content=[OutputText()])
            self._begin(item, events)
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        events.append(self._event("output_text.delta", item.id, content_index=0, delta=text, logprobs=logprobs))

    def _write_call(self, delta: CallDelta, events: list[ResponseEvent]) -> None:
        item = self._current()
        if delta.name or not isinstance(item, CallItem):
            item = CallItem(id=new_id("fc", "_"), call_id=delta.id or new_call_id(self._short_ids), name=delta.name)
            self._begin(item, events)
        if delta.arguments:
            item.arguments += delta.arguments
            events.append(self._event("function_call_arguments.delta", item.id, delta=delta.arguments))

    def _current(self) -> OutputItem | None:
        return self.items[-1] if self._open else None

    def _begin(self, item: OutputItem, events: list[ResponseEvent]) -> None:
        self._close(events)
        self.items.append(item)
        self._open = True
        index = len(self.items) - 1
        events.append(ResponseEvent(type="response.output_item.added", output_index=index, item=_empty(item)))
        if not isinstance(item, CallItem):
            part = type(item.content[0])()
            events.append(self._event("content_part.added", item.id, content_index=0, part=part))

    def _close(self, events: list[ResponseEvent], status: str = "completed") -> None:
        if not self._open:
            return
        item, self._open = self.items[-1], False
        item.status = status
        if isinstance(item, CallItem):
            events.append(
                self._event("function_call_arguments.done", item.id, name=item.name, arguments=item.arguments)
            )
        else:
            part = item.content[0]
            kind = "output_text" if isinstance(part, OutputText) else "reasoning_text"
            done = self._event(f"{kind}.done", item.id, content_index=0, text=part.text)
            if isinstance(part, OutputText):
                done.logprobs = part.logprobs
            events += [done, self._event("content_part.done", item.id, content_index=0, part=part)]
        events.append(ResponseEvent(type="response.output_item.done", output_index=len(self.items) - 1, item=item))

    def _event(self, kind: str, item_id: str, **given: Any) -> ResponseEvent:
        return ResponseEvent(type=f"response.{kind}", item_id=item_id, output_index=len(self.items) - 1, **given)


def _empty(item: OutputItem) -> OutputItem:
    """The item as it was when it began."""
    return structs.replace(item) if isinstance(item, CallItem) else structs.replace(item, content=[])

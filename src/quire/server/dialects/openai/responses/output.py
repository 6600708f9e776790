"""The output items of a response as they grow, and the events of it."""

from typing import Any

from msgspec import UNSET, structs

from quire.server.dialects.custom_tools import custom_input
from quire.server.dialects.fields import new_id
from quire.server.dialects.openai.chat_call import ChatLogprob
from quire.server.dialects.openai.responses.items import sealed_reasoning
from quire.server.dialects.openai.responses.shapes import (
    CallItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from quire.server.dialects.openai.responses.tools import ResponseTools
from quire.server.dialects.openai.tool_calls import new_call_id
from quire.text.answer_parser import AnswerDelta
from quire.text.tools.parser import CallDelta


class ResponseOutput:
    """Only the last item can be open. Output of another kind closes it."""

    def __init__(self, tools: ResponseTools, short_ids: bool = False, sealed: bool = False) -> None:
        """`sealed`: reasoning also comes as `encrypted_content`."""
        self.items: list[OutputItem] = []
        self._tools, self._sealed = tools, sealed
        self._arguments = ""  # of the open call of a custom tool
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
        if delta.name or not isinstance(item, CallItem | CustomCallItem):
            item = self._new_call(delta)
            self._begin(item, events)
        if isinstance(item, CustomCallItem):
            self._arguments += delta.arguments
        elif delta.arguments:
            item.arguments += delta.arguments
            events.append(self._event("function_call_arguments.delta", item.id, delta=delta.arguments))

    def _new_call(self, delta: CallDelta) -> CallItem | CustomCallItem:
        namespace, own_name = self._tools.namespaces.get(delta.name, (UNSET, delta.name))
        call_id = delta.id or new_call_id(self._short_ids)
        given: dict[str, Any] = {"call_id": call_id, "name": own_name, "namespace": namespace}
        self._arguments = ""
        if delta.name in self._tools.custom:
            return CustomCallItem(id=new_id("ctc", "_"), **given)
        return CallItem(id=new_id("fc", "_"), **given)

    def _current(self) -> OutputItem | None:
        return self.items[-1] if self._open else None

    def _begin(self, item: OutputItem, events: list[ResponseEvent]) -> None:
        self._close(events)
        self.items.append(item)
        self._open = True
        index = len(self.items) - 1
        events.append(ResponseEvent(type="response.output_item.added", output_index=index, item=_empty(item)))
        if isinstance(item, MessageItem | ReasoningItem):
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
        elif isinstance(item, CustomCallItem):
            item.input = custom_input(self._arguments)
            events.append(self._event("custom_tool_call_input.delta", item.id, delta=item.input))
            events.append(self._event("custom_tool_call_input.done", item.id, input=item.input))
        else:
            part = item.content[0]
            if isinstance(item, ReasoningItem) and self._sealed:
                item.encrypted_content = sealed_reasoning(part.text)
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
    return structs.replace(item, content=[]) if isinstance(item, MessageItem | ReasoningItem) else structs.replace(item)

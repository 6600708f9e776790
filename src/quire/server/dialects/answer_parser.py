"""How a chat is put to a model that may think and call tools, and how its answer is read."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.dialect import Context
from quire.text.answer_parser import AnswerDelta, AnswerReader
from quire.text.tools.call import CallDelta
from quire.text.tools.use import ToolUse


def put_chat(
    request: GenerateRequest, context: Context, messages: list[dict[str, Any]], use: ToolUse, **template: Any
) -> None:
    """Set the request's messages and all that follows from its tools. `template` are options of the chat template."""
    form = context.chat_format()
    if use.active and not use.forced and request.params.structured is not None:  # where a call is forced, it comes
        raise BadRequest(
            "a format of the answer and tools are both given, and an answer cannot be either",
            "leave one of them out, or let no tool be called",
            param="tools",
        )
    request.messages = form.messages(messages, use)
    request.template_options = {**template, "tools": form.template_tools(use)}
    request.params.structured = use.language() or request.params.structured
    if form.keeps_special(use):
        request.params.skip_special_tokens = False


@dataclass(slots=True)
class WholeCall:
    name: str
    arguments: dict[str, Any] | None  # None where they are no JSON object, having been cut short
    written: str  # the arguments as the model wrote them


def whole_calls(deltas: list[CallDelta]) -> list[WholeCall]:
    calls: list[WholeCall] = []
    for delta in deltas:
        if delta.name:
            calls.append(WholeCall(delta.name, None, ""))
        calls[-1].written += delta.arguments
    for call in calls:
        with suppress(msgspec.DecodeError):
            call.arguments = msgspec.json.decode(call.written or "{}", type=dict)
    return calls


class Reading:
    """One answer as it arrives: thoughts, text and calls told apart."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader

    @classmethod
    def of(cls, request: GenerateRequest, context: Context, use: ToolUse, prompt_ids: list[int]) -> "Reading":
        form = context.chat_format()
        tail = ""
        if form.reasoning is not None:  # does the prompt open the thoughts?
            tail = context.tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False)
        return cls(form.reader(use, tail, thinks=request.params.structured is None))

    def take(self, text: str, ended: bool) -> AnswerDelta:
        """What `text` adds; with `ended`, also what was held back until the end was known."""
        if self._reader is None:
            return AnswerDelta(content=text)
        gain = self._reader.push(text) if text else AnswerDelta()
        if ended:
            last = self._reader.end()
            gain = AnswerDelta(gain.reasoning + last.reasoning, gain.content + last.content, gain.calls + last.calls)
        return gain

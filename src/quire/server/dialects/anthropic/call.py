"""POST /v1/messages"""

from typing import Any

import msgspec

from quire.client.generate_request import GenerateRequest
from quire.server.dialects.anthropic.blocks import BlockEvents, content_blocks
from quire.server.dialects.anthropic.fields import (
    NOT_SUPPORTED,
    MessagesBody,
    decode_body,
    sampling_params,
    template_options,
    thinking_budget,
    tool_use,
)
from quire.server.dialects.anthropic.messages import plain_messages
from quire.server.dialects.anthropic.shapes import (
    AnthropicMessage,
    AnthropicUsage,
    BlockStart,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    Ping,
    ToolUseContent,
)
from quire.server.dialects.chat_request import set_chat
from quire.server.dialects.completion import Completion
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.http.openapi import EVENTS, JSON, request_body, responses
from quire.text.event import TextEvent
from quire.text.tools.params import ToolParams

_decoder = msgspec.json.Decoder(MessagesBody)


@request_body(MessagesBody, only=dict.fromkeys([*NOT_SUPPORTED, "thread"], ()))
@responses({JSON: AnthropicMessage, EVENTS: MessageEvent})
def parse_messages(body: bytes, context: Context) -> "MessagesCall":
    given = decode_body(body, _decoder)
    use = tool_use(given)
    request = GenerateRequest(
        id=new_id("msg", "_"),
        params=sampling_params(given, context.info.generation.sampling),
        window=context.info.max_model_len,  # max_tokens may be more than the context holds
        tenant=context.tenant,
    )
    messages = plain_messages(given.system, given.messages)
    request.params.thinking_token_budget = thinking_budget(given, context)
    set_chat(request, context, messages, use, **template_options(given, context))
    shown = given.thinking is None or given.thinking.display != "omitted"
    return MessagesCall(request, context, use, stream=bool(given.stream), show_reasoning=shown)


class MessagesCall:
    def __init__(
        self,
        request: GenerateRequest,
        context: Context,
        use: ToolParams,
        stream: bool,
        show_reasoning: bool = True,
    ) -> None:
        self.requests = [request]
        self._show_reasoning = show_reasoning
        self.stream = stream
        self._request, self._context, self._use = request, context, use
        self._blocks = BlockEvents(show_reasoning)
        self._begun = False
        self._num_prompt = 0
        self._num_output = 0
        self._num_cached = 0

    def begin(self, prompts: list[list[int]]) -> None:
        self._num_prompt = len(prompts[0])
        self._parser = self._context.answer_parser(self._request, self._use, prompts[0])

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        self._num_output += len(event.token_ids)
        self._num_cached = max(self._num_cached, event.num_cached_tokens)
        sent: list[object] = []
        if not self._begun:
            self._begun = True
            sent.append(MessageStart(self._message([], 1)))
        events = self._blocks.push(self._parser.push(event.text, ended=event.finish_reason is not None))
        if events and isinstance(events[0], BlockStart) and events[0].index == 0:
            events.insert(1, Ping())
        sent += events
        if event.finish_reason:
            ended = MessageEnd(*self._stop(event.finish_reason, event.stop_reason, self._blocks.called))
            usage = self._usage(self._num_output)
            sent += [*self._blocks.end(), MessageDelta(ended, usage), MessageStop()]
        return sent

    def end(self) -> list[object]:
        return []

    def full(self, completions: list[Completion]) -> object:
        [completion] = completions
        [sample] = completion.samples
        self._num_cached = completion.num_cached_tokens
        delta = self._parser.push(sample.text, ended=True)
        self._num_output = len(sample.token_ids)
        message = self._message(content_blocks(delta, self._show_reasoning), self._num_output)
        message.stop_reason, message.stop_sequence = self._stop(
            sample.finish_reason,
            sample.stop_reason,
            any(isinstance(block, ToolUseContent) for block in message.content),
        )
        return message

    def _message(self, content: list[Any], num_output: int) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._request.id, model=self._context.model, content=content, usage=self._usage(num_output)
        )

    def _usage(self, num_output: int) -> AnthropicUsage:
        return AnthropicUsage.of(self._num_prompt, self._num_cached, num_output)

    def _stop(self, reason: str | None, by: str | int | None, called: bool) -> tuple[str, str | None]:
        """The stop reason, and the stop sequence if there is one."""
        if reason == "length":
            full = self._num_output < (self._request.params.max_tokens or 0)
            return "model_context_window_exceeded" if full else "max_tokens", None
        if isinstance(by, str):
            return "stop_sequence", by
        return "tool_use" if called else "end_turn", None

"""One request for a response: what to generate, and its events."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, QuireError
from quire.server.dialects.chat_request import set_chat
from quire.server.dialects.completion import Completion
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.dialects.openai.chat import effort_options
from quire.server.dialects.openai.chat_call import ChatLogprob, chat_logprob
from quire.server.dialects.openai.responses import body as asked
from quire.server.dialects.openai.responses.items import InputItem, input_items, item_messages
from quire.server.dialects.openai.responses.output import ResponseOutput
from quire.server.dialects.openai.responses.shapes import (
    OutputItem,
    ReasoningTokens,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    response_sse,
)
from quire.server.dialects.openai.responses.store import StoredResponse
from quire.server.dialects.openai.responses.tools import ResponseTools, response_tools, served
from quire.server.dialects.openai.shapes import CachedTokens
from quire.server.dialects.openai.usage import UsageCounter
from quire.server.dialects.truncation import newest_that_fit, num_tokens
from quire.server.http.body import decode
from quire.text.answer_parser import AnswerParser
from quire.text.event import TextEvent, TokenLogprob
from quire.text.tools.params import ToolParams


class ResponseHistory(Protocol):
    """The responses of a tenant that a request may refer to."""

    def response(self, tenant: str, name: str) -> StoredResponse: ...

    def items(self, tenant: str) -> Mapping[str, InputItem | OutputItem]: ...


def parse_response(body: bytes, context: Context, history: ResponseHistory) -> "ResponseCall":
    given = decode(body, asked.decoder)
    asked.check(given)
    tools = response_tools(given.tools, given.tool_choice, given.parallel_tool_calls)
    use = tools.use
    items = _referred(input_items(given.input), context.tenant, history)
    messages = item_messages(items)
    size = len(body)
    if given.previous_response_id is not None:
        previous = history.response(context.tenant, given.previous_response_id)
        messages = [*previous.messages, *output_messages(previous.response), *messages]
        size += previous.size
    if not messages and not given.instructions:
        raise BadRequest("input is empty", "give at least one item", param="input")
    if given.truncation == "auto":
        messages = _fitting(messages, given, context, use)
    effort = given.reasoning.effort if given.reasoning is not None else None
    request = GenerateRequest(
        id=new_id("resp", "_"),
        params=asked.params_of(given, **context.info.generation.sampling, structured=asked.structured_output_of(given)),
        tenant=context.tenant,
        salt=given.cache_salt or "",
        priority=given.priority or 0,
    )
    set_chat(request, context, _with_instructions(messages, given), use, **effort_options(effort, "reasoning.effort"))
    return ResponseCall(
        given, request, context, tools, StoredResponse(_response(given, request, context), items, messages, size)
    )


def _referred(items: list[InputItem], tenant: str, history: ResponseHistory) -> list[InputItem]:
    """The items, with stored ones where a client refers to them by id."""
    if all(item.type != "item_reference" for item in items):
        return items
    known, whole = history.items(tenant), []
    for index, item in enumerate(items):
        if item.type == "item_reference":
            if (stored := known.get(item.id or "")) is None:
                hint = "it was not stored, or is gone: send the whole item"
                raise BadRequest(f"no item `{item.id}`", hint, param=f"input[{index}].id")
            item = msgspec.convert(msgspec.to_builtins(stored), InputItem)
        whole.append(item)
    return whole


def _fitting(
    messages: list[dict[str, Any]], given: asked.ResponseBody, context: Context, use: ToolParams
) -> list[dict[str, Any]]:
    def size(some: list[dict[str, Any]]) -> float:
        return num_tokens(_with_instructions(some, given), context, use)

    return newest_that_fit(messages, size, context.info.max_model_len - (given.max_output_tokens or 1))


def _with_instructions(messages: list[dict[str, Any]], given: asked.ResponseBody) -> list[dict[str, Any]]:
    if given.instructions is None:
        return messages
    return [{"role": "system", "content": given.instructions}, *messages]


def _response(given: asked.ResponseBody, request: GenerateRequest, context: Context) -> ResponseObject:
    choice = given.tool_choice
    effort = given.reasoning.effort if given.reasoning is not None else None
    form = given.text.format if given.text is not None else None
    return ResponseObject(
        id=request.id,
        created_at=int(time.time()),
        status="queued" if given.background else "in_progress",
        background=bool(given.background),
        instructions=given.instructions,
        max_output_tokens=given.max_output_tokens,
        max_tool_calls=given.max_tool_calls,
        metadata=given.metadata or {},
        model=context.model,
        output=[],
        parallel_tool_calls=given.parallel_tool_calls is not False,
        previous_response_id=given.previous_response_id,
        prompt_cache_key=given.prompt_cache_key,
        reasoning={"effort": effort, "summary": given.reasoning.summary if given.reasoning else None},
        safety_identifier=given.safety_identifier,
        store=given.store is not False,
        temperature=request.params.temperature,
        truncation=given.truncation or "disabled",
        text={"format": form or {"type": "text"}},
        tool_choice=choice or "auto",
        tools=served(given.tools),
        top_logprobs=given.top_logprobs or 0,
        top_p=request.params.top_p,
        user=given.user,
    )


def output_messages(response: ResponseObject) -> list[dict[str, Any]]:
    """The output of a response as messages of the next request."""
    return item_messages([msgspec.convert(msgspec.to_builtins(item), InputItem) for item in response.output])


class ResponseCall:
    """`keep` is called with the response when it has succeeded."""

    def __init__(
        self,
        given: asked.ResponseBody,
        request: GenerateRequest,
        context: Context,
        tools: ResponseTools,
        stored: StoredResponse,
    ) -> None:
        self.requests = [request]
        self.stream = bool(given.stream)
        self.background = bool(given.background)
        self.stored = stored
        self.keep: Callable[[StoredResponse], object] | None = None
        self.accepted = asyncio.Event()
        self.problem: QuireError | None = None  # why it failed, in the background
        self._context, self._use = context, tools.use
        sealed = asked.ENCRYPTED in (given.include or ())
        self._output = ResponseOutput(tools, context.chat_format().short_ids, sealed)
        self._tally = UsageCounter(None)
        self._parser = AnswerParser()
        self._top = given.top_logprobs or 0
        self._num_events = 0
        self._begun = False  # `response.in_progress` was sent
        self._finish_reason: str | None = None

    @property
    def response(self) -> ResponseObject:
        return self.stored.response

    def begin(self, prompts: list[list[int]]) -> None:
        self._tally.begin(prompts)
        self._parser = self._context.answer_parser(self.requests[0], self._use, prompts[0])
        if self.stored.journal is not None:  # a client that knows the id can come back
            self._numbered([self._now("created"), self._now("queued")])
        self.response.status = "in_progress"
        self.accepted.set()

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        begun = [] if self._num_events else [self._now("created")]
        if not self._begun:
            self._begun = True
            begun.append(self._now("in_progress"))
        return self._numbered(begun + self._take(event))

    def end(self) -> list[object]:
        return self._last(self._finish())

    def full(self, completions: list[Completion]) -> object:
        [completion] = completions
        [sample] = completion.samples
        self._take(
            TextEvent(
                index=0,
                text=sample.text,
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                num_cached_tokens=completion.num_cached_tokens,
            )
        )
        self._finish()
        return self.response

    def fail(self, problem: QuireError) -> None:
        """It failed, in the background."""
        self.problem = problem
        self.response.status = "failed"
        self.response.error = {"code": "server_error", "message": problem.message}
        if self.accepted.is_set():
            self._last("failed")

    def cancel(self) -> None:
        """It was cancelled, in the background. The output so far stays."""
        self.response.status = "cancelled"
        self._numbered(self._output.end("incomplete"))
        self.response.output = self._output.items
        self._last("incomplete")  # OpenAI has no event for cancelling

    def _now(self, what: str) -> ResponseEvent:
        return ResponseEvent(type=f"response.{what}", response=msgspec.structs.replace(self.response, output=[]))

    def _last(self, what: str) -> list[object]:
        events = self._numbered([ResponseEvent(type=f"response.{what}", response=self.response)])
        if self.stored.journal is not None:
            self.stored.journal.end()
        return events

    def _take(self, event: TextEvent) -> list[ResponseEvent]:
        self._tally.add(0, event)
        ended = event.finish_reason is not None
        events = self._output.push(self._parser.push(event.text, ended), self._logprobs(event.logprobs))
        if ended:
            self._finish_reason = event.finish_reason
            if not self._output.items:
                events += self._output.empty()
            events += self._output.end("incomplete" if event.finish_reason == "length" else "completed")
        return events

    def _finish(self) -> str:
        """-> its status"""
        response, usage = self.response, self._tally.usage()
        reasoning = self._output.reasoning
        num_reasoning = len(self._context.tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        response.output = self._output.items
        response.status = "incomplete" if self._finish_reason == "length" else "completed"
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            CachedTokens(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            ReasoningTokens(num_reasoning),
            usage.total_tokens,
        )
        self.stored.size += len(msgspec.json.encode(response))
        if self.keep is not None:
            self.keep(self.stored)
        return response.status

    def _numbered(self, events: list[ResponseEvent]) -> list[object]:
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
            if self.stored.journal is not None:
                self.stored.journal.add(response_sse(event))
        return list(events)

    def _logprobs(self, positions: list[list[TokenLogprob]] | None) -> list[ChatLogprob] | None:
        return None if positions is None else [chat_logprob(position, self._top) for position in positions]

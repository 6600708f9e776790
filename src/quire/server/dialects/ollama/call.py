"""POST /api/generate and /api/chat. Their responses differ in the field that holds the text."""

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, Struct

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.chat_request import set_chat
from quire.server.dialects.completion import Completion
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.dialects.ollama.fields import OllamaFields, num_logprobs, refuse, refuse_unloading, structured
from quire.server.dialects.ollama.options import known_options, sampling_params, window
from quire.server.dialects.ollama.shapes import LINES, CallClock, OllamaMessage, OllamaResponse, logprobs_of, timestamp
from quire.server.dialects.tool_calls import CompletedCall, completed_calls
from quire.server.dialects.truncation import newest_that_fit, num_tokens
from quire.server.http.body import decode
from quire.server.http.openapi import JSON, request_body, responses
from quire.text.answer_parser import AnswerDelta, AnswerParser
from quire.text.chat.chat_format import NO_TOOLS
from quire.text.chat.fill_in_middle import fim_prompt, fim_stop_ids
from quire.text.event import TextEvent, TokenLogprob
from quire.text.tools.params import ToolParams
from quire.text.tools.parser import CallDelta


class OllamaGenerateBody(OllamaFields, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None  # without the chat template
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None
    width: int | None = None  # these three are for images
    height: int | None = None
    steps: int | None = None


class OllamaInputFunction(Struct):
    name: str = ""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class OllamaInputCall(Struct, kw_only=True):
    function: OllamaInputFunction
    id: str = ""


class OllamaInputMessage(Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaInputCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaFields, kw_only=True):
    messages: list[OllamaInputMessage] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


_generate = msgspec.json.Decoder(OllamaGenerateBody)
_chat = msgspec.json.Decoder(OllamaChatBody)


@request_body(OllamaGenerateBody)
@responses({JSON: OllamaResponse, LINES: OllamaResponse})
def parse_generate(body: bytes, context: Context) -> "OllamaCall":
    given = decode(body, _generate)
    for name in ("template", "context", "images", "width", "height", "steps"):
        refuse(name, getattr(given, name))
    refuse_unloading(given)
    if not given.prompt:
        return OllamaCall(given, [], chat=False)
    request = _request(given, context)
    if given.suffix:
        request.prompt_ids = fim_prompt(context.tokenizer, given.prompt, given.suffix)
        if request.prompt_ids is None:
            raise BadRequest(f"{given.model} does not support insert (suffix)", param="suffix")
        request.params.stop_token_ids = fim_stop_ids(context.tokenizer)
        return OllamaCall(given, [request], chat=False)
    if given.raw or (context.tokenizer.chat_template is None and not given.system):
        request.prompt = given.prompt
        return OllamaCall(given, [request], chat=False)
    system = [{"role": "system", "content": given.system}] if given.system else []
    messages = [*system, {"role": "user", "content": given.prompt}]
    set_chat(request, context, messages, NO_TOOLS, **_thinking(given, context))
    return OllamaCall(given, [request], chat=False, make_parser=partial(context.answer_parser, request, NO_TOOLS))


@request_body(OllamaChatBody)
@responses({JSON: OllamaResponse, LINES: OllamaResponse})
def parse_chat(body: bytes, context: Context) -> "OllamaCall":
    given = decode(body, _chat)
    refuse_unloading(given)
    if not given.messages:
        return OllamaCall(given, [], chat=True)
    request = _request(given, context)
    use = ToolParams([_tool(tool, index) for index, tool in enumerate(given.tools or ())])
    messages = [_plain(message) for message in given.messages]
    if (room := request.truncate_prompt_tokens) is not None and len(body) > room:  # a token is a byte or more
        messages = newest_that_fit(messages, lambda some: num_tokens(some, context, use), room)
    set_chat(request, context, messages, use, **_thinking(given, context))
    return OllamaCall(given, [request], chat=True, make_parser=partial(context.answer_parser, request, use))


def _request(given: OllamaFields, context: Context) -> GenerateRequest:
    known = known_options(given.options)
    room = window(known, context.info.max_model_len)
    return GenerateRequest(
        id=new_id("ollama"),
        params=sampling_params(
            known,
            context.info.generation.sampling,
            logprobs=num_logprobs(given),
            structured=structured(given.format),
        ),
        window=room,
        truncate_prompt_tokens=None if given.truncate is False else room - 1,
        tenant=context.tenant,
    )


def _thinking(given: OllamaFields, context: Context) -> dict[str, Any]:
    """Options of the chat template. Without `think`, the template decides."""
    if given.think is None:
        return {}
    if context.chat_format().reasoning is None:
        if given.think is False:
            return {}
        raise BadRequest(f'"{given.model}" does not support thinking', param="think")
    level = {"reasoning_effort": given.think} if isinstance(given.think, str) else {}
    return {"enable_thinking": bool(given.think), **level}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"tools[{index}] has no function with a name", param=f"tools[{index}].function")
    return {"type": "function", "function": function}


def _plain(message: OllamaInputMessage) -> dict[str, Any]:
    """As chat templates take it."""
    refuse("messages.images", message.images)
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": call.id, "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


class OllamaCall:
    """Without a request it only loads the model."""

    def __init__(
        self,
        body: OllamaFields,
        requests: list[GenerateRequest],
        chat: bool,
        make_parser: Callable[[list[int]], AnswerParser] = lambda prompt_ids: AnswerParser(),
    ) -> None:
        self.requests = requests
        self.stream = body.stream is not False
        self._chat = chat
        self._model = body.model
        self._top = body.top_logprobs or 0
        self._make_parser = make_parser
        self._clock = CallClock()
        self._calls: list[CallDelta] = []  # sent when they are complete
        self._num_prompt = 0
        self._num_output = 0
        self._done_reason = "load"

    def begin(self, prompts: list[list[int]]) -> None:
        self._clock.begin()
        self._num_prompt = sum(map(len, prompts))
        self._parser = self._make_parser(prompts[0] if prompts else [])

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        self._clock.token()
        self._num_output += len(event.token_ids)
        if event.finish_reason:
            self._done_reason = event.finish_reason
        delta = self._parser.push(event.text, ended=event.finish_reason is not None)
        self._calls += delta.calls
        delta.calls = self._calls if event.finish_reason else []
        return [self._answer(delta, event.logprobs)] if delta or event.logprobs else []

    def end(self) -> list[object]:
        return [self._done(self._answer(AnswerDelta(), None))]

    def full(self, completions: list[Completion]) -> object:
        delta, logprobs = AnswerDelta(), None
        for completion in completions:
            [sample] = completion.samples
            self._clock.token(completion.first_token)
            delta, logprobs = self._parser.push(sample.text, ended=True), sample.logprobs
            self._num_output, self._done_reason = len(sample.token_ids), sample.finish_reason or ""
        return self._done(self._answer(delta, logprobs))

    def _answer(self, delta: AnswerDelta, logprobs: list[list[TokenLogprob]] | None) -> OllamaResponse:
        answer = OllamaResponse(model=self._model, created_at=timestamp())
        calls = completed_calls(delta.calls)
        broken = "".join(f"{call.name}({call.written}" for call in calls if call.arguments is None)  # cut short
        if self._chat:
            answer.message = message = OllamaMessage(content=delta.content + broken)
            message.thinking = delta.reasoning or UNSET
            message.tool_calls = [tool_call(call) for call in calls if call.arguments is not None] or UNSET
        else:
            answer.response, answer.thinking = delta.content, delta.reasoning or UNSET
        answer.logprobs = logprobs_of(logprobs, self._top) if logprobs else UNSET
        return answer

    def _done(self, answer: OllamaResponse) -> OllamaResponse:
        answer.done, answer.done_reason = True, self._done_reason
        if self.requests:
            self._clock.write(answer, self._num_prompt, self._num_output)
        return answer


def tool_call(call: CompletedCall) -> dict[str, Any]:
    return {"id": f"call_{uuid4().hex[:8]}", "function": {"name": call.name, "arguments": call.arguments}}

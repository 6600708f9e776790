"""POST /api/generate and /api/chat. They differ in where the text of an answer stands."""

from typing import Any

import msgspec
from msgspec import UNSET, Struct

from quire.engine.generate import GenerateRequest
from quire.server.body import decode
from quire.server.dialects.dialect import Context
from quire.server.dialects.ollama.fields import Fields, num_logprobs, refuse, refuse_unloading, structured
from quire.server.dialects.ollama.options import sampling_params
from quire.server.dialects.ollama.shapes import Answer, Clock, Message, logprobs_of, timestamp
from quire.server.dialects.openai.fields import new_id
from quire.server.fold import Completion
from quire.text.event import TextEvent, TokenLogprob


class GenerateBody(Fields, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without the chat template
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class GivenMessage(Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(Fields, kw_only=True):
    messages: list[GivenMessage] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


_generate = msgspec.json.Decoder(GenerateBody)
_chat = msgspec.json.Decoder(ChatBody)


def parse_generate(body: bytes, context: Context) -> "OllamaCall":
    given = decode(body, _generate)
    for name in ("suffix", "template", "context", "images"):
        refuse(name, getattr(given, name))
    if not given.prompt:
        refuse_unloading(given)
        return OllamaCall(given, [], chat=False)
    request = _request(given, context)
    if given.raw or (context.tokenizer.chat_template is None and not given.system):
        request.prompt = given.prompt
    else:
        system = [{"role": "system", "content": given.system}] if given.system else []
        request.messages = [*system, {"role": "user", "content": given.prompt}]
    return OllamaCall(given, [request], chat=False)


def parse_chat(body: bytes, context: Context) -> "OllamaCall":
    given = decode(body, _chat)
    refuse("tools", given.tools)
    if not given.messages:
        refuse_unloading(given)
        return OllamaCall(given, [], chat=True)
    request = _request(given, context)
    request.messages = [_plain(message) for message in given.messages]
    return OllamaCall(given, [request], chat=True)


def _request(given: Fields, context: Context) -> GenerateRequest:
    params = sampling_params(
        given.options,
        context.info.max_model_len,
        logprobs=num_logprobs(given),
        structured=structured(given.format),
    )
    return GenerateRequest(id=new_id("ollama"), params=params, tenant=context.tenant)


def _plain(message: GivenMessage) -> dict[str, Any]:
    """As chat templates read it."""
    refuse("messages.images", message.images)
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = message.tool_calls
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


class OllamaCall:
    """Without a request it only makes sure that the model is loaded."""

    def __init__(self, body: Fields, requests: list[GenerateRequest], chat: bool) -> None:
        self.requests = requests
        self.stream = body.stream is not False
        self._chat = chat
        self._model = body.model
        self._top = body.top_logprobs or 0
        self._clock = Clock()
        self._num_prompt = 0
        self._num_output = 0
        self._done_reason = "load"

    def begin(self, prompts: list[list[int]]) -> None:
        self._clock.begin()
        self._num_prompt = sum(map(len, prompts))

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        self._clock.token()
        self._num_output += len(event.token_ids)
        if event.finish_reason:
            self._done_reason = event.finish_reason
        if event.text or event.logprobs:
            return [self._answer(event.text, event.logprobs)]
        return []

    def end(self) -> list[object]:
        return [self._done(self._answer("", None))]

    def full(self, completions: list[Completion]) -> object:
        text, logprobs = "", None
        for completion in completions:
            [sample] = completion.samples
            text, logprobs = sample.text, sample.logprobs
            self._num_output, self._done_reason = len(sample.token_ids), sample.finish_reason or ""
        return self._done(self._answer(text, logprobs))

    def _answer(self, text: str, logprobs: list[list[TokenLogprob]] | None) -> Answer:
        answer = Answer(model=self._model, created_at=timestamp())
        if self._chat:
            answer.message = Message(content=text)
        else:
            answer.response = text
        answer.logprobs = logprobs_of(logprobs, self._top) if logprobs else UNSET
        return answer

    def _done(self, answer: Answer) -> Answer:
        answer.done, answer.done_reason = True, self._done_reason
        if self.requests:
            self._clock.write(answer, self._num_prompt, self._num_output)
        return answer

"""POST /v1/chat/completions"""

import time
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import BadRequest
from quire.engine.generate import GenerateRequest
from quire.server.body import decode
from quire.server.dialects.dialect import Context
from quire.server.dialects.openai.fields import Fields, Int, check, new_id, refuse, sampling_params
from quire.server.dialects.openai.messages import Message, plain_messages
from quire.server.dialects.openai.shapes import Answer, logprob_of, prompt_logprobs_of
from quire.server.dialects.openai.tally import Tally, usage_of
from quire.server.fold import Completion
from quire.server.openapi import reads
from quire.text.event import TextEvent, TokenLogprob


class ChatBody(Fields, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None  # says how tools are called; there are none
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_decoder = msgspec.json.Decoder(ChatBody)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage | UnsetType = UNSET  # in the full answer
    delta: Delta | UnsetType = UNSET  # in a chunk
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


@reads(ChatBody)
def parse_chat(body: bytes, context: Context) -> "ChatCall":
    chat = decode(body, _decoder)
    refuse(chat, _NOT_SUPPORTED)
    check(chat)
    if chat.add_special_tokens:
        raise BadRequest("a rendered chat has its special tokens", "leave it out", param="add_special_tokens")
    continues = bool(chat.continue_final_message)
    options = {
        **(chat.chat_template_kwargs or {}),
        "add_generation_prompt": not continues if chat.add_generation_prompt is None else chat.add_generation_prompt,
        "continue_final_message": continues,
    }
    request = GenerateRequest(
        id=new_id("chatcmpl"),
        params=sampling_params(chat, max_tokens=_max_tokens(chat), logprobs=_logprobs(chat)),
        messages=plain_messages(chat.messages),
        template_options=options,
        truncate_prompt_tokens=chat.truncate_prompt_tokens,
        tenant=context.tenant,
        salt=chat.cache_salt or "",
        priority=chat.priority or 0,
    )
    return ChatCall(chat, request, context)


def _max_tokens(chat: ChatBody) -> int | None:
    """Neither given: until the context is full."""
    old, new = chat.max_tokens, chat.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}", "give one of them", param="max_tokens"
        )
    return old if new is None else new


def _logprobs(chat: ChatBody) -> int | None:
    if chat.logprobs:
        return chat.top_logprobs or 0
    if chat.top_logprobs:
        raise BadRequest("top_logprobs is given and logprobs is not true", param="top_logprobs")
    return None


class ChatCall:
    def __init__(self, body: ChatBody, request: GenerateRequest, context: Context) -> None:
        self.requests = [request]
        self.stream = bool(body.stream)
        self._id = request.id
        self._created = int(time.time())
        self._model = context.model
        self._top = body.top_logprobs or 0
        self._ids_too = bool(body.return_token_ids)
        self._tally = Tally(body)
        self._prompt_ids: list[int] = []
        self._begun: set[int] = set()  # samples whose role was told

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompt_ids = prompts[0]
        self._tally.begin(prompts)

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        self._tally.add(prompt, event)
        sent: list[object] = []
        if event.index not in self._begun:
            first = self._chunk([ChatChoice(index=event.index, delta=Delta(role="assistant", content=""))])
            if self._ids_too and not self._begun:
                first.prompt_token_ids = self._prompt_ids
            self._begun.add(event.index)
            sent.append(first)
        if event.text or event.finish_reason or event.logprobs or (self._ids_too and event.token_ids):
            choice = ChatChoice(
                index=event.index,
                delta=Delta(content=event.text) if event.text else Delta(),
                logprobs=self._logprobs(event.logprobs),
                finish_reason=event.finish_reason,
            )
            if event.finish_reason:
                choice.stop_reason = event.stop_reason
            if self._ids_too:
                choice.token_ids = event.token_ids
            sent.append(self._chunk([choice]))
        return sent

    def end(self) -> list[object]:
        if not self._tally.at_end:
            return []
        last = self._chunk([])
        last.usage = self._tally.usage()
        return [last]

    def full(self, completions: list[Completion]) -> object:
        [completion] = completions
        params = self.requests[0].params
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(sample.text),
                logprobs=self._logprobs(sample.logprobs),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                token_ids=sample.token_ids if self._ids_too else UNSET,
            )
            for index, sample in enumerate(completion.samples)
        ]
        answer = self._answer("chat.completion", choices)
        answer.usage = usage_of(completions)
        if params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(completion.prompt_logprobs)
        if self._ids_too:
            answer.prompt_token_ids = self._prompt_ids
        return answer

    def _chunk(self, choices: list[ChatChoice]) -> Answer:
        chunk = self._answer("chat.completion.chunk", choices)
        if self._tally.always:
            chunk.usage = self._tally.usage()
        elif self._tally.at_end:
            chunk.usage = None
        return chunk

    def _answer(self, kind: str, choices: list[ChatChoice]) -> Answer:
        return Answer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    def _logprobs(self, positions: list[list[TokenLogprob]] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        return ChatLogprobs([self._logprob(position) for position in positions])

    def _logprob(self, position: list[TokenLogprob]) -> ChatLogprob:
        chosen = position[0]
        by_rank = sorted({token.token_id: token for token in position}.values(), key=lambda token: token.rank)
        top = [TopLogprob(token.text, logprob_of(token), token.bytes) for token in by_rank[: self._top]]
        return ChatLogprob(chosen.text, logprob_of(chosen), chosen.bytes, top)

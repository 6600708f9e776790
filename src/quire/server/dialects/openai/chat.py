"""POST /v1/chat/completions: the request."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.access.request_context import note_ignored
from quire.server.dialects.chat_request import set_chat, with_chat_template
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import Int, new_id, refuse_unsupported
from quire.server.dialects.messages import InputMessage, plain_messages, template_kwargs
from quire.server.dialects.openai.chat_call import ChatCall, ChatChoice
from quire.server.dialects.openai.fields import NOT_SUPPORTED, CompletionFields, check, sampling_params, truncation
from quire.server.dialects.openai.shapes import CompletionObject
from quire.server.dialects.openai.structured import structured_output
from quire.server.dialects.tools import NamedTool, ToolDefinition, tool_use
from quire.server.http.body import decode
from quire.server.http.openapi import EVENTS, JSON, request_body, responses


class ThinkingSwitch(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "auto", "adaptive"] = "enabled"
    budget_tokens: Int | None = None


class ChatBody(CompletionFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[InputMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None  # for templates that show them

    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None  # the template's option, where Qwen's own API has it
    thinking: "ThinkingSwitch | None" = None  # the same, where the APIs of DeepSeek, GLM and Kimi have it
    thinking_token_budget: Int | None = None  # tokens of reasoning at most
    thinking_budget: Int | None = None  # the same, as Qwen's own API calls it
    thinking_budget_tokens: Int | None = None  # and llama-server
    echo: bool | None = None  # vLLM's: with continue_final_message, the answer begins with the message

    verbosity: str | None = None  # these three are accepted, without effect
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    tool_prompt: Any = None  # of Text Generation Inference


_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "tool_prompt": (),
}

NOT_SUPPORTED_IN_CHATS = {**NOT_SUPPORTED, **_NOT_SUPPORTED}

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_decoder = msgspec.json.Decoder(ChatBody)


@request_body(ChatBody, only=NOT_SUPPORTED_IN_CHATS)
@responses({JSON: CompletionObject[ChatChoice], EVENTS: CompletionObject[ChatChoice]})
def parse_chat(body: bytes, context: Context) -> ChatCall:
    chat = decode(body, _decoder)
    refuse_unsupported(chat, _NOT_SUPPORTED)
    check(chat)
    if chat.web_search_options is not None:
        note_ignored("web_search_options")
    context = with_chat_template(context, chat.chat_template)
    use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    max_tokens = _agreed({"max_tokens": chat.max_tokens, "max_completion_tokens": chat.max_completion_tokens})
    request = GenerateRequest(
        id=new_id("chatcmpl"),
        params=sampling_params(
            chat,
            context.info.generation.sampling,
            max_tokens=max_tokens,  # None: until the context is full
            logprobs=_logprobs(chat),
            structured=structured_output(chat),
            thinking_token_budget=_agreed(
                {
                    "thinking_token_budget": chat.thinking_token_budget,
                    "thinking_budget": chat.thinking_budget,
                    "thinking_budget_tokens": chat.thinking_budget_tokens,
                    "thinking.budget_tokens": chat.thinking.budget_tokens if chat.thinking else None,
                }
            ),
        ),
        add_special_tokens=bool(chat.add_special_tokens),
        **truncation(chat.truncate_prompt_tokens, chat.truncation_side, max_tokens, context),
        tenant=context.tenant,
        salt=chat.cache_salt or "",
        priority=chat.priority or 0,
    )
    messages = plain_messages(chat.messages)
    set_chat(request, context, messages, use, **_template_options(chat))
    return ChatCall(
        request,
        context,
        use,
        stream=bool(chat.stream),
        stream_options=chat.stream_options,
        top_logprobs=None if chat.logprob_token_ids else chat.top_logprobs or 0,
        token_ids=bool(chat.return_token_ids),
        by_id=bool(chat.return_tokens_as_token_ids),
        reasoning=chat.include_reasoning is not False,
        custom=frozenset(tool.custom.name for tool in chat.tools or () if tool.type == "custom" and tool.custom),
        echo=messages[-1]["content"] or "" if chat.echo and request.template_options["continue_final_message"] else "",
    )


def _template_options(chat: ChatBody) -> dict[str, Any]:
    continues = bool(chat.continue_final_message or chat.messages[-1].prefix)  # the last message may say so itself
    ours: dict[str, Any] = {
        "add_generation_prompt": not continues if chat.add_generation_prompt is None else chat.add_generation_prompt,
        "continue_final_message": continues,
    }
    if chat.documents is not None:
        ours["documents"] = chat.documents
    thinks = chat.enable_thinking
    if thinks is None and chat.thinking is not None:
        thinks = chat.thinking.type != "disabled"
    return {
        **effort_options(chat.reasoning_effort, "reasoning_effort"),
        **({} if thinks is None else {"enable_thinking": thinks}),
        **template_kwargs(chat.chat_template_kwargs),
        **ours,
    }


def effort_options(effort: str | None, where: str) -> dict[str, Any]:
    """Options of the chat template. Templates that can turn reasoning off look at `enable_thinking`."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise BadRequest(f"{where} is `{effort}`", f"give one of {', '.join(EFFORTS)}", param=where)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _agreed(names: Mapping[str, int | None]) -> int | None:
    """What is given under one of several names for the same, or under several of them alike."""
    given = {name: value for name, value in names.items() if value is not None}
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name} is {value}" for name, value in given.items())
        raise BadRequest(told, "they mean the same: give one of them", param=next(iter(given)))
    return next(iter(given.values()), None)


def _logprobs(chat: ChatBody) -> int | None:
    if chat.logprobs or chat.logprob_token_ids:
        return chat.top_logprobs or 0
    if chat.top_logprobs:
        raise BadRequest("top_logprobs is given and logprobs is not true", param="top_logprobs")
    return None

"""The body of /v1/messages. An unknown field is refused with Anthropic's message."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.structured import Structured
from quire.server.access.request_context import note_ignored
from quire.server.dialects.anthropic.messages import AnthropicInputMessage, TextBlock
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import Int
from quire.server.dialects.messages import not_text
from quire.server.http.body import Body, decode, parts
from quire.text.tools.params import ToolChoiceMode, ToolParams


class NoThreads(BadRequest):
    """Anthropic's client recognizes the code, and then sends the whole conversation with every request."""

    code = "thread_unsupported_request"


class Strict(Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as absent."""


class AnthropicTool(Struct, kw_only=True):
    """One of the client's own, or one of Anthropic's, which have fields of their own."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    input_examples: Any = None
    eager_input_streaming: bool | None = None  # arguments are always streamed
    allowed_callers: Any = None
    defer_loading: bool | None = None


class AnthropicToolChoice(Strict, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Strict, kw_only=True):
    type: str
    budget_tokens: Int | None = None
    display: str | None = None


class OutputFormat(Strict, kw_only=True):
    type: str
    schema: dict[str, Any]


class OutputConfig(Strict, kw_only=True):
    format: OutputFormat | None = None
    effort: str | None = None
    task_budget: Any = None  # without effect


class PromptBody(Strict, kw_only=True):
    """The fields that determine the prompt."""

    model: str
    messages: list[AnthropicInputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    mcp_servers: Any = None

    cache_control: Any = None  # these are accepted, without effect; prefixes are always cached
    anthropic_beta: Any = None
    anthropic_version: Any = None
    betas: Any = None
    compaction: Any = None  # nothing is removed from a conversation
    context_management: Any = None
    speed: str | None = None


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: Int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    container: Any = None
    thread: Any = None

    metadata: dict[str, Any] | None = None  # these are accepted, without effect
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None


NOT_SUPPORTED = ("container", "mcp_servers")
_IGNORED = ("compaction", "context_management", "fallbacks")  # without effect, which the client is told
_OWN_TOOL = re.compile(
    r"[a-z0-9_]{1,64}_20[0-9]{6}"
)  # of Anthropic's own: its servers run it, or its models know its schema
_CHOICES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_VALUE = re.compile(r"invalid value '(\w+)'")
_INDEX = re.compile(r"\[(\d+)\]")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    return decode(body, decoder, explain)


def explain(message: str, body: type[Struct]) -> BadRequest:
    kind, path, what = parts(message)
    path = _INDEX.sub(r".\1", path)
    if path.endswith(".type") and (block := _VALUE.fullmatch(what)):  # an image, say
        return BadRequest(f"{path}: `{block[1]}` is not supported", not_text(block[1], path).hint, param=path)
    said = {"unknown": "Extra inputs are not permitted", "missing": "Field required"}.get(kind, what)
    return BadRequest(f"{path}: {said}" if path else said, param=path or None)


def tool_use(body: PromptBody) -> ToolParams:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            if not _OWN_TOOL.fullmatch(tool.type):
                said = f"tools.{index}.type: `{tool.type}` is not supported"
                raise BadRequest(said, "give tools of your own", param="tools")
            note_ignored(f"tools.{index} ({tool.type})")
            continue
        if not tool.name:
            raise BadRequest(f"tools.{index}.name: Field required", param="tools")
        schema = tool.input_schema or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice
    if choice is None:
        return ToolParams(tools)
    if choice.type not in _CHOICES:
        raise BadRequest(f"tool_choice.type: `{choice.type}` is not one of {', '.join(_CHOICES)}", param="tool_choice")
    return ToolParams(tools, _CHOICES[choice.type], choice.name or "", not choice.disable_parallel_tool_use)


def sampling_params(body: MessagesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """`defaults`: the model's."""
    for name in NOT_SUPPORTED:
        if getattr(body, name):
            raise BadRequest(f"{name}: not supported", "leave it out", param=name)
    for name in _IGNORED:
        if getattr(body, name):
            note_ignored(name)
    if body.thread:
        raise NoThreads("thread: not supported", "send the whole conversation", param="thread")
    if body.temperature is not None and not 0.0 <= body.temperature <= 1.0:
        raise BadRequest(f"temperature: {body.temperature} is not in the range 0..1", param="temperature")
    given = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        structured=_structured(body),
    )


def _structured(body: MessagesBody) -> Structured | None:
    output = (body.output_config.format if body.output_config else None) or body.output_format
    if output is None:
        return None
    if output.type != "json_schema":
        raise BadRequest(f"output_config.format.type: `{output.type}` is not supported", param="output_config")
    return Structured("json_schema", msgspec.json.encode(output.schema).decode(), disable_additional_properties=True)


def template_options(body: PromptBody, context: Context) -> dict[str, Any]:
    """An assistant message at the end is continued. Reasoning is off unless it is asked for."""
    options: dict[str, Any] = {}
    last = body.messages[-1] if body.messages else None
    if last is not None and last.role == "assistant" and last.content:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        end = last.content if isinstance(last.content, str) else getattr(last.content[-1], "text", "")
        if end != end.rstrip():
            raise BadRequest("messages: final assistant content cannot end with trailing whitespace", param="messages")
    thinks = _thinking_enabled(body.thinking)
    if context.chat_format().reasoning is not None:
        options["enable_thinking"] = thinks
    elif thinks:
        note_ignored("thinking")  # this model has no reasoning
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort
    return options


def thinking_budget(body: PromptBody, context: Context) -> int | None:
    """Tokens of reasoning at most."""
    if body.thinking is None or body.thinking.budget_tokens is None or not _thinking_enabled(body.thinking):
        return None
    reasoning = context.chat_format().reasoning
    if reasoning is None or reasoning.end_id(context.tokenizer.id_of) is None:
        note_ignored("thinking.budget_tokens")
        return None
    return body.thinking.budget_tokens


def _thinking_enabled(config: ThinkingConfig | None) -> bool:
    if config is None:
        return False
    if config.type not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(f"thinking.type: `{config.type}` is not one of enabled, disabled, adaptive", param="thinking")
    return config.type != "disabled"

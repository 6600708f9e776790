"""POST /v1/responses: the request."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.structured import Structured
from quire.server.dialects.fields import Int, Salt, refuse_unsupported
from quire.server.dialects.openai.responses.items import InputItem
from quire.server.dialects.openai.structured import Schema, schema_output
from quire.server.dialects.tools import allowed_tool_use, parse_tool_choice
from quire.text.tools.params import ToolParams


class ResponseTool(Struct, kw_only=True, omit_defaults=True):
    """A function. Tools that OpenAI itself would run are refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, kw_only=True, omit_defaults=True):
    """A function that must be called, or with the type `allowed_tools`, the functions that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: "list[NamedFunction] | None" = None


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as absent, for every field."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None

    user: str | None = None  # these five are accepted, without effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    top_k: Int | None = None  # these are vLLM's
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    priority: Int | None = None
    cache_salt: Salt | None = None

    access_programs: Any = None
    conversation: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    service_tier: Any = None
    stream_options: Any = None


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "conversation": (),
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled", "auto"),
}

LOGPROBS = "message.output_text.logprobs"

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "min_tokens",
)

decoder = msgspec.json.Decoder(ResponseBody)


def check(body: ResponseBody) -> None:
    refuse_unsupported(body, NOT_SUPPORTED)
    if body.background and body.store is False:
        raise BadRequest("a response in the background has to be stored", "leave out store", param="store")
    for index, what in enumerate(body.include or ()):
        if what != LOGPROBS:
            raise BadRequest(f"`{what}` is not supported", f"only {LOGPROBS} is", param=f"include[{index}]")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise BadRequest("top_logprobs is given and the logprobs are not included", param="top_logprobs")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise BadRequest("`text.verbosity` is not supported", "leave it out", param="text.verbosity")
    if body.reasoning is not None:
        for name in ("summary", "generate_summary"):
            if getattr(body.reasoning, name) is not None:
                where = f"reasoning.{name}"
                raise BadRequest(f"`{where}` is not supported", "reasoning is returned as it is", param=where)


def tools_of(body: ResponseBody) -> ToolParams:
    plain = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise BadRequest(
                f"a tool of type `{tool.type}` is not supported", "give functions", param=f"tools[{index}].type"
            )
        if not tool.name:
            raise BadRequest(f"tools[{index}] has no name", param=f"tools[{index}].name")
        function = msgspec.to_builtins(tool)
        del function["type"]
        plain.append({"type": "function", "function": function})
    several = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        if choice.type == "allowed_tools" and choice.tools is not None:
            names = [tool.name or "" for tool in choice.tools]
            return allowed_tool_use(plain, names, choice.mode or "auto", several)
        if choice.type != "function" or not choice.name:
            what = f"tool_choice of type `{choice.type}` is not supported"
            raise BadRequest(what, "name a function", param="tool_choice")
        return ToolParams(plain, "named", choice.name, several)
    return ToolParams(plain, parse_tool_choice(choice), parallel=several)


def structured_output_of(body: ResponseBody) -> Structured | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Structured("json")
    if form.type == "json_schema":
        if form.schema is None:
            raise BadRequest("text.format has no schema", param="text.format.schema")
        return schema_output(form.schema, "text.format.schema")
    raise BadRequest(
        f"text.format has type `{form.type}`", "give text, json_object or json_schema", param="text.format.type"
    )


def params_of(body: ResponseBody, **given: Any) -> SamplingParams:
    for name in _SAMPLING:
        if (value := getattr(body, name)) is not None:
            given[name] = value
    logprobs = (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None
    return SamplingParams(max_tokens=body.max_output_tokens, logprobs=logprobs, **given)

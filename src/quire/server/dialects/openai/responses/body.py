"""POST /v1/responses: the request."""

from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.structured import Structured
from quire.server.access.request_context import note_ignored
from quire.server.dialects.fields import Int, Salt, refuse_unsupported
from quire.server.dialects.openai.responses.items import InputItem
from quire.server.dialects.openai.responses.tools import NamedResponseTool, ResponseTool
from quire.server.dialects.openai.structured import Schema, schema_output
from quire.server.dialects.samplers import SAMPLER_FIELDS, SamplerFields


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None  # without effect: reasoning is returned as it is
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # without effect


class ResponseBody(SamplerFields, kw_only=True, forbid_unknown_fields=True):
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
    tool_choice: str | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None

    user: str | None = None  # these are accepted, without effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None  # nothing is compacted
    max_tool_calls: Int | None = None  # of the tools that OpenAI runs
    service_tier: str | None = None
    stream_options: "ResponseStreamOptions | None" = None
    session_id: str | None = None
    request_id: str | None = None

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
    image: Any = None
    moderation: Any = None
    prompt: Any = None


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled", "auto"),
}

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = (  # the others belong to tools that OpenAI runs
    LOGPROBS,
    ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    *SAMPLER_FIELDS,
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
        if what not in INCLUDABLE:
            raise BadRequest(f"`{what}` is not known", f"{', '.join(INCLUDABLE)} are", param=f"include[{index}]")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise BadRequest("top_logprobs is given and the logprobs are not included", param="top_logprobs")
    if body.context_management:
        note_ignored("context_management")


def structured_output_of(body: ResponseBody) -> Structured | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Structured("json")
    if form.type == "json_schema":
        if form.schema is None:
            raise BadRequest("text.format has no schema", param="text.format.schema")
        return schema_output(form.schema, "text.format.schema", form.strict)
    raise BadRequest(
        f"text.format has type `{form.type}`", "give text, json_object or json_schema", param="text.format.type"
    )


def params_of(body: ResponseBody, **given: Any) -> SamplingParams:
    """`given`: the model's defaults, and what is no field of the sampler."""
    for name in _SAMPLING:
        if (value := getattr(body, name)) is not None:
            given[name] = value
    logprobs = (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None
    return SamplingParams(max_tokens=body.max_output_tokens, logprobs=logprobs, **given)

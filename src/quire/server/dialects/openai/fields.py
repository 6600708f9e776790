"""The fields that chat and completions share, and their `SamplingParams`."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.server.access.request_context import note_ignored
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import Int, Salt, refuse_unsupported
from quire.server.dialects.openai.structured import ResponseFormat, Schema, StructuredOutputs
from quire.server.dialects.samplers import SAMPLER_FIELDS, SamplerFields


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect


class CompletionFields(SamplerFields, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as absent, for every field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None

    priority: Int | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = (
        None  # in logprobs: `token_id:` and the id, where the token's text would be
    )

    user: str | None = None  # these are accepted, without effect
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None  # prefixes are always cached
    prompt_cache_retention: str | None = None
    store: bool | None = None  # of OpenAI's: only responses are stored here
    service_tier: str | None = None
    session_id: str | None = None
    request_id: str | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    enable_in_reasoning: bool | None = None  # structured output holds in reasoning, too: there is none
    guided_decoding_backend: str | None = None  # without effect: there is one backend

    truncation_side: Literal["left", "right"] | None = None  # the end of the prompt that is cut off
    spaces_between_special_tokens: bool | None = None  # these are vLLM's: accepted where they ask for the default
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


# Passed on under the same name when given; the defaults are those of SamplingParams.
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    *SAMPLER_FIELDS,
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "length_penalty",
    "early_stopping",
    "enable_in_reasoning",
)

# Fields that are not supported, with the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "spaces_between_special_tokens": (True,),
}


def check(body: CompletionFields) -> None:
    """What both routes refuse before anything else is checked."""
    if body.kv_transfer_params:
        _check_transfer(body)
    refuse_unsupported(body, NOT_SUPPORTED)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options is given and stream is not true", param="stream_options")
    if body.truncate_prompt_tokens is not None and (
        body.truncate_prompt_tokens < -1 or not body.truncate_prompt_tokens
    ):
        raise BadRequest(
            f"truncate_prompt_tokens is {body.truncate_prompt_tokens}",
            "keep at least one, or -1: as many as fit",
            param="truncate_prompt_tokens",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be streamed", "leave out stream", param="prompt_logprobs")


def _check_transfer(body: CompletionFields) -> None:
    """vLLM's proxies ask a prefill server to keep the blocks of a prompt, which happens anyway."""
    params = body.kv_transfer_params
    if isinstance(params, dict) and params.get("do_remote_decode") and not params.get("do_remote_prefill"):
        body.kv_transfer_params = None
        note_ignored("kv_transfer_params")
    else:
        raise BadRequest(
            "`kv_transfer_params` is not supported",
            "leave it out: a server with the kv_role kv_consumer asks its kv_producer by itself",
            param="kv_transfer_params",
        )


def truncation(kept: int | None, side: str | None, max_tokens: int | None, context: Context) -> dict[str, Any]:
    """Fields of a request. -1 keeps what the context has room for beside max_tokens."""
    if kept == -1:
        kept = max(context.info.max_model_len - (max_tokens or 1), 1)
    return {"truncate_prompt_tokens": kept, "truncate_end": side == "right"}


def sampling_params(body: CompletionFields, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
    """`defaults`: the model's. `given`: parameters whose names or defaults differ between the two routes."""
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:
            given.setdefault(name, value)
    given = {**defaults, **given}
    if body.use_beam_search:
        given["beam_width"] = given.get("n", 1)
    params = SamplingParams(**given)
    if body.stream and (params.beam_width or params.num_samples > params.n):
        field = "use_beam_search" if params.beam_width else "best_of"
        raise BadRequest(
            f"{field} cannot be streamed: the best samples are known at the end", "leave out stream", param=field
        )
    return params

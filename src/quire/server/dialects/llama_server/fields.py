"""The bodies of /completion and /infill, and their `SamplingParams`. Names and defaults are llama-server's. Unknown
fields are ignored, as there."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import MAX_LOGPROBS, SamplingParams
from quire.core.structured import Structured
from quire.server.dialects.fields import Int
from quire.server.dialects.samplers import SAMPLER_FIELDS, SamplerFields

SHOWN_DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n_predict": -1,
    "seed": -1,
}

_OUR_NAMES = {"repeat_penalty": "repetition_penalty"}


class LlamaFields(SamplerFields, kw_only=True):
    """Null is the same as absent. cache_prompt, id_slot and n_keep ask for what a server with slots does."""

    model: str | None = None
    stream: bool | None = None
    n_predict: Int | None = None  # -1: until the context is full
    temperature: float | None = None
    top_k: Int | None = None  # 0: all
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # -1: any
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | list[tuple[int | str, float | bool]] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: Int | None = None
    return_tokens: bool | None = None


class LlamaCompletionBody(LlamaFields, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, texts, token ids, or lists of token ids


class ExtraText(Struct, kw_only=True):
    text: str
    filename: str | None = None


class InfillBody(LlamaFields, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraText] | None = None  # of other files, shown before the prefix
    prompt: str | None = None  # the beginning of the middle


completion_decoder = msgspec.json.Decoder(LlamaCompletionBody)
infill_decoder = msgspec.json.Decoder(InfillBody)


def sampling_params(
    body: LlamaFields, defaults: Mapping[str, Any], tokens_of: Any, stop_token_ids: list[int]
) -> SamplingParams:
    """`defaults`: the model's. `tokens_of`: text -> its token ids, for biases of texts."""

    def given(name: str) -> Any:
        value = getattr(body, name)
        return defaults.get(_OUR_NAMES.get(name, name), SHOWN_DEFAULTS[name]) if value is None else value

    samplers = {name: value for name in SAMPLER_FIELDS if (value := getattr(body, name)) is not None}

    if body.n_probs is not None and not 0 <= body.n_probs <= MAX_LOGPROBS:
        raise BadRequest(f"n_probs is {body.n_probs}", f"give 0 to {MAX_LOGPROBS}", param="n_probs")
    return SamplingParams(
        temperature=max(given("temperature"), 0.0),
        top_k=max(given("top_k"), 0),
        top_p=given("top_p"),
        min_p=given("min_p"),
        typical_p=given("typical_p"),
        repetition_penalty=given("repeat_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        max_tokens=given("n_predict") if given("n_predict") >= 0 else None,
        seed=None if given("seed") == -1 else given("seed"),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_logit_bias(body.logit_bias, tokens_of),
        structured=_structured(body),
        logprobs=body.n_probs or None,
        **samplers,
    )


def _logit_bias(given: Any, tokens_of: Any) -> dict[int, float]:
    """Of token ids, or of all tokens of a text. False forbids it."""
    biases: dict[int, float] = {}
    for key, bias in given.items() if isinstance(given, dict) else given or ():
        if bias is True:
            raise BadRequest("logit_bias has `true`", "give a number, or false to forbid", param="logit_bias")
        digits = str(key).removeprefix("-")
        ids = [int(key)] if digits.isascii() and digits.isdigit() and len(digits) < 10 else tokens_of(key)
        biases |= dict.fromkeys(ids, -100.0 if bias is False else float(bias))
    return biases


def _structured(body: LlamaFields) -> Structured | None:
    if body.grammar and body.json_schema is not None:
        raise BadRequest("grammar and json_schema are both given", "give one of them", param="grammar")
    if body.json_schema is not None:
        return Structured("json_schema", msgspec.json.encode(body.json_schema).decode())
    return Structured("grammar", body.grammar) if body.grammar else None

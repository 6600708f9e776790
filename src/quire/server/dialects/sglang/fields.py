"""The body of /generate, and its `SamplingParams`. Names and defaults are SGLang's. Unknown fields beside the prompt
are ignored, and those of `sampling_params` are refused, as there."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.structured import Structured
from quire.server.dialects.fields import Int, Salt, refuse_unsupported
from quire.server.http.body import decode, texts_or_ids

DEFAULT_MAX_NEW_TOKENS = 128
MAX_RID = 128  # characters

T = TypeVar("T")


class SglangSampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is the same as absent."""

    max_new_tokens: Int | None = DEFAULT_MAX_NEW_TOKENS  # null: until the context is full
    min_new_tokens: Int | None = None
    n: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    no_stop_trim: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None  # -1: all
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    spaces_between_special_tokens: bool | None = None
    stop_regex: str | list[str] | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: Int | None = None  # without effect: every token is sent


class SglangBody(Struct, kw_only=True):
    """A field of several prompts is a list with a value for each, or one value for all."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: str | list[str] | None = None  # with several prompts, a text is the beginning of each id
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int | list[Int] | None = None  # of the prompt; -1: no logprobs of it
    top_logprobs_num: Int | list[Int] | None = None
    return_text_in_logprobs: bool | None = None
    lora_path: str | list[str | None] | None = None
    priority: Int | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None
    token_ids_logprob: list[Any] | None = None
    input_embeds: list[Any] | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: dict[str, Any] | None = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if self.text is not None and self.input_ids is not None:
            raise BadRequest("text and input_ids are both given", "give one of them", param="input_ids")
        if self.text is not None:
            return texts_or_ids(self.text if isinstance(self.text, str) else [*self.text], "text")
        if self.input_ids is not None:
            return texts_or_ids([*self.input_ids], "input_ids")
        raise BadRequest("text is missing", "give text or input_ids", param="text")

    @property
    def is_batch(self) -> bool:
        """It is answered with a list."""
        if self.input_ids is not None:
            return bool(self.input_ids) and isinstance(self.input_ids[0], list)
        return isinstance(self.text, list)

    def of_each(self, name: str, num_prompts: int, default: T) -> list[T]:
        """The values of a field, one for each prompt."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [default if value is None else value] * num_prompts
        if len(value) != num_prompts:
            what = f"{name} has {len(value)} values, and there are {num_prompts} prompts"
            raise BadRequest(what, "give one for each, or one for all", param=name)
        return [default if each is None else each for each in value]


# Fields that are not supported, with the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "token_ids_logprob": ([],),
    "input_embeds": (),
    "image_data": ([], ""),
    "video_data": ([], ""),
    "audio_data": ([], ""),
    "session_params": ({},),
    "custom_logit_processor": ("",),
    "return_hidden_states": (False,),
}
SAMPLING_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "stop_regex": ([], ""),
    "custom_params": ({},),
    "spaces_between_special_tokens": (True,),
}

_OUR_NAMES = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "no_stop_trim": "include_stop_str_in_output",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "logit_bias": "logit_bias",
    "sampling_seed": "seed",
    "stop": "stop",
}


class _PromptField(Struct):
    """What tells the bodies of one /generate from those of the other."""

    inputs: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    input_ids: Raw | UnsetType = UNSET


class _LoraField(Struct):
    lora_path: str | list[str | None] | None = None


decoder = msgspec.json.Decoder(SglangBody)
_prompt = msgspec.json.Decoder(_PromptField)
_lora = msgspec.json.Decoder(_LoraField)


def has_sglang_prompt(body: bytes) -> bool:
    try:
        given = _prompt.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return given.inputs is UNSET and not (given.text is UNSET and given.input_ids is UNSET)


def lora_path(body: bytes) -> str | None:
    """The adapter that a body asks for; None: the base model."""
    given = decode(body, _lora).lora_path
    names = dict.fromkeys(given if isinstance(given, list) else [given])
    if len(names) > 1:
        raise BadRequest("lora_path names several adapters", "send a request for each", param="lora_path")
    return next(iter(names), None) or None


def check(body: SglangBody) -> None:
    refuse_unsupported(body, NOT_SUPPORTED)
    given = body.sampling_params
    for sampling in given if isinstance(given, list) else [given] if given else []:
        refuse_unsupported(sampling, SAMPLING_NOT_SUPPORTED)


def sampling_params(
    sampling: SglangSampling, defaults: Mapping[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """`defaults`: the model's. The one token that is computed where none is asked for is not shown."""
    named = {ours: value for theirs, ours in _OUR_NAMES.items() if (value := getattr(sampling, theirs)) is not None}
    return SamplingParams(
        **{**defaults, **named},
        max_tokens=1 if sampling.max_new_tokens == 0 else sampling.max_new_tokens,
        structured=_structured(sampling),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _structured(sampling: SglangSampling) -> Structured | None:
    names = ("json_schema", "regex", "ebnf", "structural_tag")
    asked = [name for name in names if getattr(sampling, name)]
    if len(asked) > 1:
        raise BadRequest(
            f"{asked[0]} and {asked[1]} are both given", "give one of them", param=f"sampling_params.{asked[1]}"
        )
    if not asked:
        return None
    [name], value = asked, getattr(sampling, asked[0])
    if name == "json_schema":
        return Structured("json_schema", _schema_text(value))
    if name == "structural_tag":
        return Structured("structural_tag", value if isinstance(value, str) else msgspec.json.encode(value).decode())
    return Structured("regex" if name == "regex" else "grammar", value)


def _schema_text(schema: str | dict[str, Any]) -> str:
    """As it was sent, where it is text."""
    if isinstance(schema, dict):
        return msgspec.json.encode(schema).decode()
    try:
        msgspec.json.decode(schema, type=dict[str, msgspec.Raw] | bool)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(
            f"json_schema is not a JSON schema: {error}", "give an object", param="sampling_params.json_schema"
        ) from None
    return schema

"""The body of /generate, and its `SamplingParams`. Unknown fields are ignored, and ranges checked, as in Text
Generation Inference."""

import random
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import MAX_SAMPLES, SamplingParams
from quire.core.structured import Structured
from quire.core.watermark import Watermark
from quire.server.dialects.fields import Int
from quire.server.http.body import decode

MAX_STOP_SEQUENCES = 64
MAX_TOP_N_TOKENS = 20
MAX_BEST_OF = MAX_SAMPLES
_SAMPLING = ("temperature", "top_k", "top_p", "typical_p")  # any of these turns sampling on


class TgiGrammar(Struct):
    type: Literal["json", "json_schema", "regex"]
    value: Any


class TgiParameters(Struct):
    """Null is the same as absent."""

    best_of: Int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: Int | None = None  # absent: until the context is full
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: Int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: Int | None = None
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """Otherwise the most likely token is taken."""
        return bool(self.do_sample) or any(getattr(self, name) is not None for name in _SAMPLING)


class TgiGenerateBody(Struct):
    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None  # of POST / only

    @property
    def effective_parameters(self) -> TgiParameters:
        return TgiParameters(do_sample=True) if self.parameters is None else self.parameters


class _AdapterNamed(Struct):
    class Inner(Struct):
        adapter_id: str | None = None

    parameters: Inner | None = None


decoder = msgspec.json.Decoder(TgiGenerateBody)
_adapter = msgspec.json.Decoder(_AdapterNamed)


def adapter_id(body: bytes) -> str | None:
    """The adapter that a body asks for; None: the base model."""
    named = decode(body, _adapter).parameters
    return named.adapter_id if named else None


def sampling_params(
    body: TgiGenerateBody, stream: bool, mark: Watermark, defaults: Mapping[str, Any]
) -> SamplingParams:
    """`defaults`: the model's, for requests that sample."""
    given = body.effective_parameters
    _check(body, given, stream)
    best_of = given.best_of or 1
    sampling: dict[str, Any] = {"temperature": 0.0}
    if given.samples:
        # The seed is chosen here, so that the details can show it.
        sampling = {**defaults, "seed": random.getrandbits(63) if given.seed is None else given.seed}
        sampling |= {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    if given.repetition_penalty is not None:
        sampling["repetition_penalty"] = given.repetition_penalty
    return SamplingParams(
        n=best_of,
        **sampling,
        frequency_penalty=given.frequency_penalty or 0.0,
        max_tokens=given.max_new_tokens,
        stop=given.stop or [],
        include_stop_str_in_output=True,
        logprobs=given.top_n_tokens or 0,
        prompt_logprobs=0 if given.decoder_input_details else None,
        structured=_structured(given.grammar),
        watermark=mark if given.watermark else None,
    )


def _check(body: TgiGenerateBody, given: TgiParameters, stream: bool) -> None:
    """What Text Generation Inference refuses and `SamplingParams` accepts."""
    if not body.inputs:
        raise BadRequest("`inputs` cannot be empty", param="inputs")
    best_of = 1 if given.best_of is None else given.best_of
    _require(1 <= best_of <= MAX_BEST_OF, "best_of", f"must be > 0 and <= {MAX_BEST_OF}", best_of)
    if best_of > 1:
        _require(given.samples, "best_of", "needs sampling: set `do_sample`", best_of)
        _require(given.seed is None, "seed", "must not be set when `best_of` > 1", given.seed)
        _require(not stream, "best_of", "must be 1 when streaming tokens", best_of)
    if stream:
        _require(not given.decoder_input_details, "decoder_input_details", "must be false when streaming tokens", True)
    for name in ("top_p", "typical_p"):
        value = getattr(given, name)
        _require(value is None or 0.0 < value < 1.0, name, "must be > 0.0 and < 1.0", value)
    for name in ("temperature", "top_k", "max_new_tokens", "truncate", "repetition_penalty"):
        value = getattr(given, name)
        _require(value is None or value > 0, name, "must be strictly positive", value)
    stops, top = len(given.stop or ()), given.top_n_tokens or 0
    _require(stops <= MAX_STOP_SEQUENCES, "stop", f"must have <= {MAX_STOP_SEQUENCES} sequences", stops)
    _require(0 <= top <= MAX_TOP_N_TOKENS, "top_n_tokens", f"must be >= 0 and <= {MAX_TOP_N_TOKENS}", top)


def _require(met: bool, name: str, rule: str, value: object) -> None:
    if not met:
        raise BadRequest(f"`{name}` {rule}. Given: {value}", param=f"parameters.{name}")


def _structured(grammar: TgiGrammar | None) -> Structured | None:
    if grammar is None:
        return None
    value = grammar.value
    if grammar.type == "regex":
        _require(isinstance(value, str), "grammar.value", "must be a regex", value)
        return Structured("regex", value)
    if grammar.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise BadRequest(f"`grammar.value` is not JSON: {error}", param="parameters.grammar.value") from None
    _require(isinstance(value, dict), "grammar.value", "must be a JSON schema", value)
    return Structured("json_schema", msgspec.json.encode(value).decode(), disable_additional_properties=True)

"""Bodies of /generate and /infer, and their `SamplingParams`.

Values may be text, as Triton's clients send numbers: "0.5" is 0.5."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.server.dialects.fields import Int
from quire.server.http.body import check_number, explain


class KServeParameters(Struct, kw_only=True, forbid_unknown_fields=True):
    """Names are vLLM's; `max_new_tokens`, `stop_words` and `bad_words` are those of other backends. Null is the same
    as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: Int | None = None
    max_new_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_words: str | list[str] | None = None
    bad_words: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    exclude_input_in_output: bool | None = None  # the default; false: the output begins with the input

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults`: the model's."""
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.max_new_tokens is not None:
            given.setdefault("max_tokens", self.max_new_tokens)
        given |= {name: words for name in ("stop", "bad_words") if (words := self._words(name))}
        return SamplingParams(**{**defaults, **given})

    def _words(self, name: str) -> list[str]:
        given = self.stop or self.stop_words if name == "stop" else self.bad_words
        return [given] if given and isinstance(given, str) else list(given or ())


PARAMETERS = KServeParameters.__struct_fields__
_OTHERS = ("max_new_tokens", "stop", "stop_words", "bad_words", "stream", "exclude_input_in_output")
_SAME_NAME = tuple(name for name in PARAMETERS if name not in _OTHERS)  # as in SamplingParams


class KServeGenerateBody(KServeParameters, kw_only=True, forbid_unknown_fields=True):
    """Parameters may also stand beside `text_input`, as with Triton's backends."""

    text_input: str
    id: str | None = None
    parameters: dict[str, Any] | None = None


class InputTensor(Struct, kw_only=True):
    name: str
    datatype: Literal["BYTES", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64"]
    shape: list[Int]
    data: list[Any]
    parameters: dict[str, Any] | None = None


class RequestedOutput(Struct, kw_only=True):
    name: str
    parameters: dict[str, Any] | None = None


class KServeInferBody(Struct, kw_only=True, forbid_unknown_fields=True):
    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[RequestedOutput] | None = None


def read_parameters(given: Mapping[str, Any] | None, where: str = "parameters") -> KServeParameters:
    try:
        return msgspec.convert(dict(given or {}), KServeParameters, strict=False)
    except msgspec.ValidationError as error:
        wrong = explain(str(error), KServeParameters)
        param = f"{where}.{wrong.param}" if wrong.param else where
        raise BadRequest(f"{where}: {wrong.message}", wrong.hint, param=param) from None


def read_inputs(body: KServeInferBody) -> tuple[list[str], KServeParameters]:
    """The texts and the parameters: of the body, of `sampling_parameters` (JSON), of tensors of one value."""
    texts: list[str] | None = None
    values = dict(body.parameters or {})
    for index, tensor in enumerate(body.inputs):
        where = f"inputs[{index}].data"
        if tensor.name == "sampling_parameters":
            values |= _json_object(_one(tensor, where), where)
        elif tensor.name in PARAMETERS:
            values[tensor.name] = _one(tensor, where)
        elif texts is None and tensor.datatype == "BYTES":
            texts = _texts(tensor, where)
        else:
            hint = f"send one tensor of texts, and {', '.join(PARAMETERS)}"
            raise BadRequest(f"the input `{tensor.name}` is not known", hint, param=f"inputs[{index}].name")
    if not texts:
        raise BadRequest("no input has texts", "send a BYTES tensor called text_input", param="inputs")
    return texts, read_parameters(values, "inputs")


def _texts(tensor: InputTensor, where: str) -> list[str]:
    data = [item for row in tensor.data for item in (row if isinstance(row, list) else [row])]  # [n] or [n, 1]
    check_number(data, where)
    for item in data:
        if not isinstance(item, str):
            raise BadRequest(f"{where} has {item!r}, which is no text", "send strings", param=where)
    return data


def _one(tensor: InputTensor, where: str) -> Any:
    data: Any = tensor.data
    while isinstance(data, list):
        if len(data) != 1:
            raise BadRequest(f"{where} has {len(data)} values", "send one", param=where)
        data = data[0]
    return data


def _json_object(text: Any, where: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, TypeError) as error:
        raise BadRequest(f"{where} is not JSON: {error}", param=where) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{where} is no JSON object", param=where)
    return value

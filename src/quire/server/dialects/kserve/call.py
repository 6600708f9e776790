"""POST /v2/models/{model}/generate, /generate_stream and /infer."""

import msgspec
from msgspec import UNSET

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.completion import Completion
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.dialects.kserve.fields import (
    PARAMETERS,
    KServeGenerateBody,
    KServeInferBody,
    KServeParameters,
    read_inputs,
    read_parameters,
)
from quire.server.dialects.kserve.shapes import GeneratedText, InferResponse, OutputTensor
from quire.server.http.body import decode
from quire.server.http.openapi import EVENTS, JSON, request_body, responses
from quire.text.event import TextEvent

OUTPUT = "text_output"

_generate = msgspec.json.Decoder(KServeGenerateBody, strict=False)
_infer = msgspec.json.Decoder(KServeInferBody)


@request_body(KServeGenerateBody)
@responses({JSON: GeneratedText})
def parse_generate(body: bytes, context: Context) -> "KServeCall":
    return _generate_call(body, context, stream=False)


@request_body(KServeGenerateBody)
@responses({EVENTS: GeneratedText})
def parse_generate_stream(body: bytes, context: Context) -> "KServeCall":
    return _generate_call(body, context, stream=True)


@request_body(KServeInferBody)
@responses({JSON: InferResponse})
def parse_infer(body: bytes, context: Context) -> "KServeInferCall":
    given = decode(body, _infer)
    for index, output in enumerate(given.outputs or ()):
        if output.name != OUTPUT:
            raise BadRequest(f"there is no output `{output.name}`", f"ask for {OUTPUT}", param=f"outputs[{index}].name")
    texts, parameters = read_inputs(given)
    if parameters.stream:
        raise BadRequest("`stream` is true, and /infer answers once", "use /generate_stream", param="inputs")
    return KServeInferCall(texts, parameters, given.id, context)


def _generate_call(body: bytes, context: Context, stream: bool) -> "KServeCall":
    given = decode(body, _generate)
    beside = {name: getattr(given, name) for name in PARAMETERS}
    parameters = read_parameters({**beside, **(given.parameters or {})})
    if parameters.stream and not stream:
        raise BadRequest("`stream` is true, and /generate answers once", "use /generate_stream", param="stream")
    return KServeCall([given.text_input], parameters, given.id, context, stream)


class KServeCall:
    """Of one text."""

    def __init__(
        self,
        texts: list[str],
        parameters: KServeParameters,
        request_id: str | None,
        context: Context,
        stream: bool = False,
    ) -> None:
        name = new_id("kserve")
        self.stream = stream
        self.requests = [
            GenerateRequest(
                id=f"{name}-{index}",
                params=parameters.sampling_params(context.info.generation.sampling),
                prompt=text,
                tenant=context.tenant,
            )
            for index, text in enumerate(texts)
        ]
        self._echo = parameters.exclude_input_in_output is False
        self._texts, self._model, self._id = texts, context.model, UNSET if request_id is None else request_id
        self._begun = False  # the first event was sent

    def begin(self, prompts: list[list[int]]) -> None:
        pass

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        if not event.text and not event.finish_reason:
            return []
        text = event.text if self._begun or not self._echo else self._texts[prompt] + event.text
        self._begun = True
        return [
            GeneratedText(
                id=self._id, model_name=self._model, text_output=text, finish_reason=event.finish_reason or UNSET
            )
        ]

    def end(self) -> list[object]:
        return []

    def full(self, completions: list[Completion]) -> object:
        [text] = self._outputs(completions)
        [sample] = completions[0].samples
        return GeneratedText(
            id=self._id, model_name=self._model, text_output=text, finish_reason=sample.finish_reason or UNSET
        )

    def _outputs(self, completions: list[Completion]) -> list[str]:
        answers = [completion.samples[0].text for completion in completions]
        return [f"{text}{answer}" if self._echo else answer for text, answer in zip(self._texts, answers, strict=True)]


class KServeInferCall(KServeCall):
    """Of one text or several."""

    def full(self, completions: list[Completion]) -> object:
        texts = self._outputs(completions)
        output = OutputTensor(name=OUTPUT, shape=[len(texts)], data=texts)
        return InferResponse(id=self._id, model_name=self._model, outputs=[output])

"""POST /generate, /generate_stream and /, which is either of them."""

from math import inf

from quire.client.generate_request import GenerateRequest
from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.dialects.tgi.fields import TgiGenerateBody, decoder, sampling_params
from quire.server.dialects.tgi.shapes import (
    Details,
    PrefillToken,
    StreamedToken,
    TgiResponse,
    Token,
    finish_reason,
)
from quire.server.http.body import decode
from quire.server.http.openapi import EVENTS, JSON, request_body, responses
from quire.text.event import TextEvent, TokenLogprob
from quire.text.tokenizers.detokenizer import Detokenizer


@request_body(TgiGenerateBody)
@responses({JSON: TgiResponse})
def parse_generate(body: bytes, context: Context) -> "GenerateCall":
    return _call(decode(body, decoder), context, stream=False)


@request_body(TgiGenerateBody)
@responses({EVENTS: StreamedToken})
def parse_generate_stream(body: bytes, context: Context) -> "GenerateCall":
    return _call(decode(body, decoder), context, stream=True)


@request_body(TgiGenerateBody)
@responses({JSON: list[TgiResponse], EVENTS: StreamedToken})
def parse_either(body: bytes, context: Context) -> "GenerateCall":
    given = decode(body, decoder)
    return _call(given, context, stream=bool(given.stream), listed=True)


def _call(body: TgiGenerateBody, context: Context, stream: bool, listed: bool = False) -> "GenerateCall":
    request = GenerateRequest(
        id=new_id("tgi"),
        params=sampling_params(body, stream, context.options.watermark, context.info.generation.sampling),
        prompt=body.inputs,
        truncate_prompt_tokens=body.effective_parameters.truncate,
        tenant=context.tenant,
    )
    return GenerateCall(body, request, context, stream, listed)


class GenerateCall:
    def __init__(
        self, body: TgiGenerateBody, request: GenerateRequest, context: Context, stream: bool, listed: bool
    ) -> None:
        self.requests = [request]
        self.stream = stream
        self._body, self._parameters = body, body.effective_parameters
        self._listed = listed  # the response is the one element of a list
        self._tokenizer = context.tokenizer
        self._seed = request.params.seed
        self._top = self._parameters.top_n_tokens or 0
        self._prompt_ids: list[int] = []
        self._sent = CompletionSample()  # of a stream
        self._num_sent = 0

    def begin(self, prompts: list[list[int]]) -> None:
        [self._prompt_ids] = prompts
        self._detokenizer = self._new_detokenizer()

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        """One for each token. The last has the whole text, and the details if they are asked for."""
        sent: list[object] = []
        self._sent.text += event.text
        for position in event.logprobs or ():
            self._num_sent += 1
            text = self._detokenizer.push([position[0].token_id])
            chunk = StreamedToken(index=self._num_sent, token=self._token(position[0], text))
            if self._top:
                chunk.top_tokens = self._top_tokens(position)
            sent.append(chunk)
        if event.finish_reason:
            if not sent:  # the end has no token of its own
                sent.append(StreamedToken(index=self._num_sent + 1, token=Token(0, "", 0.0, True)))
            last = sent[-1]
            assert isinstance(last, StreamedToken)
            last.token.text += self._detokenizer.flush()
            last.generated_text = self._full_text(self._sent.text)
            if self._parameters.details:
                last.details = Details(
                    finish_reason=finish_reason(event.finish_reason, event.stop_reason),
                    generated_tokens=self._num_sent,
                    seed=self._seed,
                    input_length=len(self._prompt_ids),
                )
        return sent

    def end(self) -> list[object]:
        return []

    def full(self, completions: list[Completion]) -> object:
        [completion] = completions
        best, *others = sorted(completion.samples, key=_mean_logprob, reverse=True)
        answer = TgiResponse(generated_text=self._full_text(best.text))
        if self._parameters.details or self._parameters.decoder_input_details:
            answer.details = self._details(best, completion)
            if others:
                answer.details.best_of_sequences = []
                for other in others:
                    details = self._details(other, completion)
                    details.generated_text = self._full_text(other.text)
                    answer.details.best_of_sequences.append(details)
        return [answer] if self._listed else answer

    def _details(self, sample: CompletionSample, completion: Completion) -> Details:
        detokenizer = self._new_detokenizer()
        details = Details(
            finish_reason=finish_reason(sample.finish_reason, sample.stop_reason),
            generated_tokens=len(sample.token_ids),
            seed=self._seed,
            prefill=self._prefill(completion),
            tokens=[
                self._token(position[0], detokenizer.push([position[0].token_id])) for position in sample.logprobs or ()
            ],
        )
        if self._top:
            details.top_tokens = [self._top_tokens(position) for position in sample.logprobs or ()]
        return details

    def _prefill(self, completion: Completion) -> list[PrefillToken]:
        if not self._parameters.decoder_input_details:
            return []
        first = completion.prompt_ids[0]
        text = self._tokenizer.token_bytes(first).decode(errors="replace")
        known = [position[0] for position in completion.prompt_logprobs or ()]
        return [
            PrefillToken(first, text, None),
            *(PrefillToken(token.token_id, token.text, token.finite_logprob) for token in known),
        ]

    def _token(self, token: TokenLogprob, text: str) -> Token:
        """`text` is what the token adds. Joined, these are the answer, even where a character spans several tokens."""
        return Token(token.token_id, text, token.finite_logprob, token.token_id in self._tokenizer.special_ids)

    def _top_tokens(self, position: list[TokenLogprob]) -> list[Token]:
        by_rank = sorted({token.token_id: token for token in position}.values(), key=lambda token: token.rank)
        return [self._token(token, token.text) for token in by_rank[: self._top]]

    def _full_text(self, text: str) -> str:
        return self._body.inputs + text if self._parameters.return_full_text else text

    def _new_detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, False, self._prompt_ids[-8:])


def _mean_logprob(sample: CompletionSample) -> float:
    logprobs = [position[0].logprob for position in sample.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -inf

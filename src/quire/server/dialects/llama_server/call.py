"""POST /completion and /infill."""

from typing import Any

import msgspec

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.core.request import DraftUsage
from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.dialects.llama_server.fields import (
    SHOWN_DEFAULTS,
    InfillBody,
    LlamaCompletionBody,
    LlamaFields,
    completion_decoder,
    infill_decoder,
    sampling_params,
)
from quire.server.dialects.llama_server.shapes import LlamaCompletion, PrefillClock, logprobs_of
from quire.server.http.body import decode, texts_or_ids
from quire.server.http.openapi import EVENTS, JSON, request_body, responses
from quire.text.chat.fill_in_middle import fim_prompt, fim_stop_ids
from quire.text.event import TextEvent, TokenLogprob


@request_body(LlamaCompletionBody)
@responses({JSON: LlamaCompletion | list[LlamaCompletion], EVENTS: LlamaCompletion})
def parse_completion(body: bytes, context: Context) -> "LlamaCall":
    given = decode(body, completion_decoder)
    prompts = texts_or_ids(given.prompt, "prompt")
    listed = isinstance(given.prompt, list) and not isinstance(given.prompt[0], int)
    return LlamaCall(given, [_request(given, context, prompt) for prompt in prompts], context, listed)


@request_body(InfillBody)
@responses({JSON: LlamaCompletion, EVENTS: LlamaCompletion})
def parse_infill(body: bytes, context: Context) -> "LlamaCall":
    given = decode(body, infill_decoder)
    extra = "".join(f"{each.text}\n" for each in given.input_extra or ())
    ids = fim_prompt(context.tokenizer, extra + given.input_prefix, given.input_suffix)
    if ids is None:
        raise BadRequest("this model cannot fill in text", "use one made to fill in code", param="input_suffix")
    ids += context.tokenizer.encode(given.prompt or "", add_special_tokens=False)
    return LlamaCall(given, [_request(given, context, ids, fim_stop_ids(context.tokenizer))], context)


def _request(
    body: LlamaFields, context: Context, prompt: str | list[int], stop_token_ids: list[int] | None = None
) -> GenerateRequest:
    def tokens_of(text: str) -> list[int]:
        return context.tokenizer.encode(text, add_special_tokens=False)

    return GenerateRequest(
        id=new_id("cmpl"),
        params=sampling_params(body, context.info.generation.sampling, tokens_of, stop_token_ids or []),
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else prompt,
        window=context.info.max_model_len,  # n_predict may be more than the context holds
        tenant=context.tenant,
    )


class LlamaCall:
    def __init__(
        self, body: LlamaFields, requests: list[GenerateRequest], context: Context, listed: bool = False
    ) -> None:
        """`listed`: the response is a list, because the prompts were."""
        self.requests = requests
        self.stream = bool(body.stream)
        self._body, self._context, self._listed = body, context, listed
        self._prompts: list[list[int]] = []
        self._clocks = [PrefillClock() for _ in requests]
        self._num_output = [0] * len(requests)

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        for clock in self._clocks:
            clock.begin()

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        self._clocks[prompt].token()
        self._num_output[prompt] += len(event.token_ids)
        sent: list[object] = []
        if event.text or event.token_ids:
            sent.append(self._piece(prompt, event.text, event.token_ids, event.logprobs))
        if event.finish_reason:
            last = self._piece(prompt, "", [], None)
            self._end(last, prompt, event, event.num_cached_tokens, event.drafts)
            sent.append(last)
        return sent

    def end(self) -> list[object]:
        return []

    def full(self, completions: list[Completion]) -> object:
        answers = [self._whole(prompt, completion) for prompt, completion in enumerate(completions)]
        return answers if self._listed else answers[0]

    def _whole(self, prompt: int, completion: Completion) -> LlamaCompletion:
        [sample] = completion.samples
        self._clocks[prompt].token(completion.first_token)
        self._num_output[prompt] = len(sample.token_ids)
        tokens = sample.token_ids if self._body.return_tokens else []
        answer = self._piece(prompt, sample.text, tokens, sample.logprobs)
        self._end(answer, prompt, sample, completion.num_cached_tokens, completion.drafts)
        return answer

    def _piece(
        self, prompt: int, text: str, tokens: list[int], logprobs: list[list[TokenLogprob]] | None
    ) -> LlamaCompletion:
        piece = LlamaCompletion(
            index=prompt,
            content=text,
            tokens=tokens,
            tokens_predicted=self._num_output[prompt],
            tokens_evaluated=len(self._prompts[prompt]),
        )
        if logprobs and self._body.n_probs:
            piece.completion_probabilities = logprobs_of(logprobs, self._body.n_probs)
        return piece

    def _end(
        self,
        answer: LlamaCompletion,
        prompt: int,
        ended: TextEvent | CompletionSample,
        num_cached: int,
        drafts: DraftUsage | None,
    ) -> None:
        ids, num_output = self._prompts[prompt], self._num_output[prompt]
        answer.stop, answer.model, answer.truncated = True, self._context.model, False
        answer.prompt = self._context.tokenizer.decode(ids, skip_special_tokens=False)
        answer.generation_settings = self._settings(prompt)
        answer.stopping_word = ended.stop_reason if isinstance(ended.stop_reason, str) else ""
        answer.stop_type = "limit" if ended.finish_reason == "length" else "word" if answer.stopping_word else "eos"
        answer.tokens_cached = len(ids) + num_output
        answer.timings = self._clocks[prompt].timings(len(ids), num_cached, num_output)
        if drafts:
            answer.timings.draft_n, answer.timings.draft_n_accepted = drafts.num_tokens, drafts.num_accepted

    def _settings(self, prompt: int) -> dict[str, Any]:
        given = msgspec.to_builtins(self._body)
        shown = {name: default if given[name] is None else given[name] for name, default in SHOWN_DEFAULTS.items()}
        return {**shown, "stop": self.requests[prompt].params.stop, "stream": self.stream}

"""POST /generate with `text` or `input_ids`."""

import time
from dataclasses import dataclass, field
from uuid import uuid4

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.core.request import FinishReason
from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import new_id
from quire.server.dialects.sglang.fields import (
    MAX_RID,
    SglangBody,
    SglangSampling,
    check,
    decoder,
    sampling_params,
)
from quire.server.dialects.sglang.shapes import Generated, MetaInfo, ShownLogprob, finish_reason, shown
from quire.server.http.body import decode
from quire.server.http.openapi import EVENTS, JSON, request_body, responses
from quire.text.event import TextEvent, TokenLogprob


@dataclass(frozen=True, slots=True)
class SglangAsked:
    """What is asked for one prompt."""

    rid: str
    shows_output: bool  # false: it asks for no tokens, and one is computed all the same
    logprobs: bool
    logprob_start: int  # of the prompt; negative: none of it
    num_top: int


@dataclass(slots=True)
class Sample:
    """What was generated so far: SGLang sends all of it, again and again."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@request_body(SglangBody)
@responses({JSON: Generated | list[Generated], EVENTS: Generated})
def parse_generate(body: bytes, context: Context) -> "SglangCall":
    given = decode(body, decoder)
    check(given)
    prompts = given.prompts
    asked = _asked(given, len(prompts))
    samplings = given.of_each("sampling_params", len(prompts), SglangSampling())
    requests = [
        _request(given, context, prompt, sampling, each)
        for prompt, sampling, each in zip(prompts, samplings, asked, strict=True)
    ]
    return SglangCall(given, requests, asked, context)


def _asked(body: SglangBody, num_prompts: int) -> list[SglangAsked]:
    samplings = body.of_each("sampling_params", num_prompts, SglangSampling())
    logprobs = body.of_each("return_logprob", num_prompts, False)
    starts = body.of_each("logprob_start_len", num_prompts, -1)
    tops = body.of_each("top_logprobs_num", num_prompts, 0)
    if body.stream and any(top and wanted for top, wanted in zip(tops, logprobs, strict=True)):
        raise BadRequest(
            "top_logprobs_num cannot be streamed: each chunk would have those of all tokens before",
            "leave out stream",
            param="top_logprobs_num",
        )
    rids = _rids(body, num_prompts)
    return [
        SglangAsked(rid, sampling.max_new_tokens != 0, logprob, start, top)
        for rid, sampling, logprob, start, top in zip(rids, samplings, logprobs, starts, tops, strict=True)
    ]


def _rids(body: SglangBody, num_prompts: int) -> list[str]:
    given = body.rid
    if isinstance(given, str):
        rids = [f"{given}_{index}" for index in range(num_prompts)] if body.is_batch else [given]
    else:
        rids = [each or new_id("sgl") for each in body.of_each("rid", num_prompts, "")]
    if (longest := max(map(len, rids), default=0)) > MAX_RID:
        raise BadRequest(f"a rid has {longest} characters", f"{MAX_RID} are allowed", param="rid")
    return rids


def _request(
    body: SglangBody, context: Context, prompt: str | list[int], sampling: SglangSampling, asked: SglangAsked
) -> GenerateRequest:
    wants_prompt = asked.logprobs and asked.logprob_start >= 0
    return GenerateRequest(
        id=f"{asked.rid}-{uuid4().hex[:8]}",  # two requests in flight may have the same rid
        params=sampling_params(
            sampling,
            context.info.generation.sampling,
            logprobs=asked.num_top if asked.logprobs else None,
            prompt_logprobs=asked.num_top if wants_prompt else None,
        ),
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else prompt,
        tenant=context.tenant,
        salt=(body.cache_salt or "") + (body.extra_key or ""),
        priority=body.priority or 0,
    )


class SglangCall:
    def __init__(
        self, body: SglangBody, requests: list[GenerateRequest], asked: list[SglangAsked], context: Context
    ) -> None:
        self.requests = requests
        self.stream = bool(body.stream)
        self._asked = asked
        self._with_text = bool(body.return_text_in_logprobs)
        self._tokenizer = context.tokenizer
        self._listed = body.is_batch or any(request.params.n > 1 for request in requests)
        self._prompts: list[list[int]] = []
        self._began = time.monotonic()
        self._samples: dict[tuple[int, int], Sample] = {}  # by prompt and sample, of a stream
        self._prompt_logprobs: dict[int, list[list[TokenLogprob]]] = {}
        self._num_cached = [0] * len(requests)

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        """Each has all of the text so far."""
        sample = self._samples.setdefault((prompt, event.index), Sample())
        sample.text += event.text
        sample.token_ids += event.token_ids
        sample.logprobs += event.logprobs or ()
        sample.finish_reason, sample.stop_reason = event.finish_reason, event.stop_reason
        self._prompt_logprobs.setdefault(prompt, []).extend(event.prompt_logprobs or ())
        self._num_cached[prompt] = max(self._num_cached[prompt], event.num_cached_tokens)
        if not (event.token_ids or event.text or event.finish_reason):
            return []
        chunk = self._generated(prompt, sample, self._prompt_logprobs[prompt], self._num_cached[prompt])
        if self._listed:
            chunk.index = sum(request.params.n for request in self.requests[:prompt]) + event.index
        return [chunk]

    def end(self) -> list[object]:
        return []

    def full(self, completions: list[Completion]) -> object:
        answers = [
            self._generated(prompt, _sample(each), completion.prompt_logprobs, completion.num_cached_tokens)
            for prompt, completion in enumerate(completions)
            for each in completion.samples
        ]
        return answers if self._listed else answers[0]

    def _generated(
        self, prompt: int, sample: Sample, prompt_logprobs: list[list[TokenLogprob]] | None, num_cached: int
    ) -> Generated:
        asked = self._asked[prompt]
        if not asked.shows_output:
            sample = Sample(finish_reason=sample.finish_reason and "length")  # the one sampled token is not shown
        meta = MetaInfo(
            id=asked.rid,
            finish_reason=finish_reason(sample.finish_reason, sample.stop_reason, sample.token_ids),
            prompt_tokens=len(self._prompts[prompt]),
            completion_tokens=len(sample.token_ids),
            cached_tokens=num_cached,
        )
        if sample.finish_reason:
            meta.e2e_latency = time.monotonic() - self._began
        if asked.logprobs:
            self._write_logprobs(meta, prompt, sample, prompt_logprobs or [])
        return Generated(text=sample.text, output_ids=[*sample.token_ids], meta_info=meta)

    def _write_logprobs(
        self, meta: MetaInfo, prompt: int, sample: Sample, prompt_logprobs: list[list[TokenLogprob]]
    ) -> None:
        asked = self._asked[prompt]
        meta.output_token_logprobs = [shown(position[0], self._with_text) for position in sample.logprobs]
        meta.input_token_logprobs = self._of_prompt(prompt, prompt_logprobs)
        if asked.num_top:
            meta.output_top_logprobs = [self._top(position, asked.num_top) for position in sample.logprobs]
            known = prompt_logprobs[asked.logprob_start :] if meta.input_token_logprobs else []
            tops = [self._top(position, asked.num_top) for position in known]
            meta.input_top_logprobs = [None, *tops] if meta.input_token_logprobs else []

    def _of_prompt(self, prompt: int, known: list[list[TokenLogprob]]) -> list[ShownLogprob]:
        """From where it is asked for. The first has no logprob, as in SGLang."""
        start, ids = self._asked[prompt].logprob_start, self._prompts[prompt]
        if not 0 <= start < len(ids):
            return []
        first = self._tokenizer.token_text(ids[start]) if self._with_text else None
        return [(None, ids[start], first), *(shown(position[0], self._with_text) for position in known[start:])]

    def _top(self, position: list[TokenLogprob], num_top: int) -> list[ShownLogprob]:
        by_rank = sorted({token.token_id: token for token in position}.values(), key=lambda token: token.rank)
        return [shown(token, self._with_text) for token in by_rank[:num_top]]


def _sample(done: CompletionSample) -> Sample:
    return Sample(done.text, done.token_ids, done.logprobs or [], done.finish_reason, done.stop_reason)

"""POST /v1/completions"""

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.completion import Completion
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import Int, created_now, new_id
from quire.server.dialects.openai.fields import NOT_SUPPORTED, CompletionFields, check, sampling_params, truncation
from quire.server.dialects.openai.shapes import CompletionObject, prompt_logprobs_of, sse, token_name
from quire.server.dialects.openai.structured import structured_output
from quire.server.dialects.openai.text_offsets import TextOffsets, prompt_offsets
from quire.server.dialects.openai.usage import UsageCounter, write_usage
from quire.server.dialects.request_size import check_echo
from quire.server.dialects.text_template import TEXT, TextTemplate
from quire.server.http.body import decode, texts_or_ids
from quire.server.http.openapi import EVENTS, JSON, request_body, responses
from quire.text.chat.fill_in_middle import fim_prompt, fim_stop_ids
from quire.text.event import TextEvent, TokenLogprob

DEFAULT_MAX_TOKENS = 16

_Shown = tuple[int, int, str, list[TokenLogprob] | None]  # a token: its offset, its id, its text, its logprobs


class CompletionBody(CompletionFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    best_of: Int | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    decoder_prompt: str | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


class CompletionLogprobs(Struct):
    """Four lists with one entry for each token. `text_offset` is where its text begins in that of the choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: Any = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@request_body(CompletionBody, only=NOT_SUPPORTED)
@responses({JSON: CompletionObject[CompletionChoice], EVENTS: CompletionObject[CompletionChoice]})
def parse_completion(body: bytes, context: Context) -> "CompletionCall":
    completion = decode(body, _decoder)
    check(completion)
    name = new_id("cmpl")
    prompts = texts_or_ids(completion.prompt, "prompt")
    if completion.suffix:
        prompts = [_fill_in_prompt(prompt, completion, context) for prompt in prompts]
        completion.stop_token_ids = [*(completion.stop_token_ids or ()), *fim_stop_ids(context.tokenizer)]
    structured = structured_output(completion)
    max_tokens = DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    of_prompt = [completion.logprobs if completion.echo else None, completion.prompt_logprobs]
    params = sampling_params(
        completion,
        context.info.generation.sampling,
        best_of=completion.best_of,
        max_tokens=1 if max_tokens == 0 and completion.echo else max_tokens,
        structured=structured,
        logprobs=completion.logprobs,
        prompt_logprobs=max((count for count in of_prompt if count is not None), default=None),
    )
    requests = [
        GenerateRequest(
            id=f"{name}-{index}",
            params=params,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=None if isinstance(prompt, str) else prompt,
            add_special_tokens=completion.add_special_tokens,
            **truncation(completion.truncate_prompt_tokens, completion.truncation_side, max_tokens, context),
            decoder_prompt=completion.decoder_prompt,
            tenant=context.tenant,
            salt=completion.cache_salt or "",
            priority=completion.priority or 0,
        )
        for index, prompt in enumerate(prompts)
    ]
    return CompletionCall(name, completion, requests, context)


def _fill_in_prompt(prompt: str | list[int], completion: CompletionBody, context: Context) -> list[int]:
    """The prompt of a model that fills in the text before a suffix."""
    if completion.echo or not isinstance(prompt, str):
        raise BadRequest("a suffix needs a prompt that is text, and no echo", param="suffix")
    ids = fim_prompt(context.tokenizer, prompt, completion.suffix or "")
    if ids is None:
        raise BadRequest("`suffix` is not supported by this model", "use one made to fill in code", param="suffix")
    return ids


class CompletionCall:
    def __init__(self, name: str, body: CompletionBody, requests: list[GenerateRequest], context: Context) -> None:
        self.requests = requests
        self.stream = bool(body.stream)
        self._id = name
        self._created = created_now()
        self._model = context.model
        self._tokenizer = context.tokenizer
        self._echo = bool(body.echo)
        self._only_echo = self._echo and body.max_tokens == 0  # the one sampled token is not shown
        self._with_logprobs = body.logprobs is not None or bool(body.logprob_token_ids)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._ids_too = bool(body.return_token_ids)
        self._by_id = bool(body.return_tokens_as_token_ids)
        self._tally = UsageCounter(body.stream_options)
        self._prompts: list[list[int]] = []
        self._prompt_logprobs: dict[int, list[list[TokenLogprob]]] = {}  # by prompt, until its echo is sent
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._has_plain_chunks = not (
            self._echo or self._with_logprobs or self._with_prompt_logprobs or self._ids_too or self._tally.always
        )
        self._templates: dict[int, TextTemplate] = {}  # by choice, of chunks that have nothing but text

    def begin(self, prompts: list[list[int]]) -> None:
        if self._echo or self._ids_too:
            check_echo(prompts, self.requests[0].params.n)
        self._prompts = prompts
        self._tally.begin(prompts)

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        if self._only_echo:
            event = replace(event, text="", token_ids=[], logprobs=None if event.logprobs is None else [])
        self._tally.add(prompt, event)
        if event.prompt_logprobs:
            self._prompt_logprobs.setdefault(prompt, []).extend(event.prompt_logprobs)
        if not (event.token_ids or event.text or event.finish_reason):
            return []
        index = prompt * self.requests[prompt].params.n + event.index
        if self._has_plain_chunks and event.finish_reason is None:
            return [self._template(index).fill(event.text)] if event.text else []
        choice = CompletionChoice(index=index, text=event.text, finish_reason=event.finish_reason)
        if event.finish_reason:
            choice.stop_reason = event.stop_reason
        return [self._chunk([choice])] if self._has_plain_chunks else self._detailed_chunks(prompt, event, choice)

    def _detailed_chunks(self, prompt: int, event: TextEvent, choice: CompletionChoice) -> list[object]:
        """With ids, logprobs or the prompt."""
        index = choice.index
        if self._ids_too:
            choice.token_ids = event.token_ids
        first = index not in self._offsets
        shown: list[_Shown] = []
        if first:
            self._offsets[index] = self._text_offsets(prompt)
            if self._echo:
                choice.text = self._prompt_text(prompt) + choice.text
                shown = self._prompt_tokens(prompt, self._prompt_logprobs.get(prompt))
            if self._ids_too:
                choice.prompt_token_ids = self._prompts[prompt]
        if self._with_logprobs:
            shown += _shown(event.logprobs, self._offsets[index])
            choice.logprobs = _logprobs(shown, self._by_id)
        elif not (choice.text or event.finish_reason or self._ids_too):
            return []
        return [self._chunk([choice])]

    def _template(self, index: int) -> TextTemplate:
        if (template := self._templates.get(index)) is None:
            choice = CompletionChoice(index=index, text=TEXT)
            template = self._templates[index] = TextTemplate(sse(self._chunk([choice])))
        return template

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionObject[CompletionChoice]:
        chunk = self._answer(choices)
        if self._tally.always:
            chunk.usage = self._tally.usage()
        elif self._tally.at_end:
            chunk.usage = None
        return chunk

    def end(self) -> list[object]:
        if not self._tally.at_end:
            return []
        last = self._answer([])
        self._tally.write(last)
        return [last]

    def full(self, completions: list[Completion]) -> object:
        if self._only_echo:
            for completion in completions:
                for sample in completion.samples:
                    sample.text, sample.token_ids, sample.logprobs = "", [], []
        choices = []
        for prompt, completion in enumerate(completions):
            params = self.requests[prompt].params
            for index, sample in enumerate(completion.samples):
                choice = CompletionChoice(
                    index=prompt * params.n + index,
                    text=(self._prompt_text(prompt) if self._echo else "") + sample.text,
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                )
                if self._with_logprobs:
                    shown = self._prompt_tokens(prompt, completion.prompt_logprobs) if self._echo else []
                    shown += _shown(sample.logprobs, self._text_offsets(prompt), len(choice.text))
                    choice.logprobs = _logprobs(shown, self._by_id)
                choice.prompt_logprobs = None
                if self._with_prompt_logprobs:
                    choice.prompt_logprobs = prompt_logprobs_of(completion.prompt_logprobs)
                if self._ids_too:
                    choice.token_ids, choice.prompt_token_ids = sample.token_ids, completion.prompt_ids
                choices.append(choice)
        answer = self._answer(choices)
        write_usage(answer, completions)
        return answer

    def _answer(self, choices: list[CompletionChoice]) -> CompletionObject[CompletionChoice]:
        return CompletionObject(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )

    def _prompt_text(self, prompt: int) -> str:
        request = self.requests[prompt]
        if request.prompt is not None and request.truncate_prompt_tokens is None:
            return request.prompt
        return self._tokenizer.decode(self._prompts[prompt], skip_special_tokens=request.params.skip_special_tokens)

    def _prompt_tokens(self, prompt: int, logprobs: list[list[TokenLogprob]] | None) -> list[_Shown]:
        """The prompt's tokens with their logprobs. The first token has none."""
        ids, tokenizer = self._prompts[prompt], self._tokenizer
        offsets = prompt_offsets(tokenizer, ids, self._prompt_text(prompt))
        rest = zip(offsets[1:], logprobs or (), strict=False)
        return [
            (0, ids[0], tokenizer.token_text(ids[0]), None),
            *((offset, position[0].token_id, position[0].text, position) for offset, position in rest),
        ]

    def _text_offsets(self, prompt: int) -> TextOffsets:
        skips = self.requests[prompt].params.skip_special_tokens
        echoed = self._prompt_text(prompt) if self._echo else ""
        return TextOffsets(self._tokenizer, skips, self._prompts[prompt], echoed)


def _shown(logprobs: list[list[TokenLogprob]] | None, offsets: TextOffsets, end: int | None = None) -> list[_Shown]:
    """`end`: of the text, where it is known. The tokens of a stop string that was cut off begin there."""
    shown: list[_Shown] = []
    for position in logprobs or ():
        token, offset = position[0], offsets.push(position[0].token_id)
        shown.append((offset if end is None else min(offset, end), token.token_id, token.text, position))
    return shown


def _logprobs(shown: list[_Shown], by_id: bool) -> CompletionLogprobs:
    lists = CompletionLogprobs([], [], [], [])
    for offset, token_id, text, position in shown:
        lists.text_offset.append(offset)
        lists.tokens.append(token_name(token_id, text, by_id))
        if position is None:
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
        else:
            lists.token_logprobs.append(position[0].finite_logprob)
            top: dict[str, float] = {}
            for token in sorted(position, key=lambda token: token.rank):
                top.setdefault(token_name(token.token_id, token.text, by_id), token.finite_logprob)
            lists.top_logprobs.append(top)
    return lists

"""Text becomes ids: a GenerateRequest becomes a Request that the scheduler can take."""

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, PromptTooLong
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.seq2seq import Seq2Seq
from quire.core.structured_defaults import STRUCTURED_DEFAULTS, StructuredDefaults
from quire.core.thinking import Thinking
from quire.text.chat.chat_format import chat_format
from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.render_budget import RenderBudget, RenderTooLong, render_budget
from quire.text.dry_breakers import DryBreakers
from quire.text.reasoning.before_answer import prompt_tail, thinking_before_answer
from quire.text.tokenizers.tokenizer import Tokenizer

LONG_TEXT = 20_000  # characters; a longer text is tokenized in a thread, so that other streams go on meanwhile
SHORT_RENDER_SECONDS = 0.01  # a template that takes longer is rendered in a thread
MAX_TOKEN_LENGTH = 256  # characters; 128 spaces are one token for some tokenizers
USUAL_TOKEN_LENGTH = 8  # characters; a text with more tokens than fit is found out by so much of it
SPARE_TOKENS = 64  # by which a part of a text may have more tokens than the same part of the whole

T = TypeVar("T")


async def run_in_thread_if_long(num_characters: int, tokenize: Callable[..., T], *arguments: Any) -> T:
    """tokenize(*arguments), in a thread if the text is long."""
    return await asyncio.to_thread(tokenize, *arguments) if num_characters > LONG_TEXT else tokenize(*arguments)


def check_characters(text: str, max_model_len: int, param: str = "prompt") -> None:
    """Refuse text that cannot fit before it is tokenized: megabytes take seconds."""
    if len(text) > MAX_TOKEN_LENGTH * max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(text)} characters, and the context holds {max_model_len} tokens",
            "shorten the prompt",
            param=param,
        )


class Prompter:
    """Renders, tokenizes and checks. What it returns, the scheduler can serve."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        seed: int | None = None,
        seq2seq: Seq2Seq | None = None,
        structured_defaults: StructuredDefaults = STRUCTURED_DEFAULTS,
        default_max_tokens: int | None = None,
    ) -> None:
        """`default_max_tokens`: of requests that name none, as far as the context has room."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size  # the model's: a tokenizer may have more tokens, or fewer
        self.max_model_len = max_model_len
        self.seq2seq = seq2seq
        self._structured_defaults = structured_defaults
        self._default_max_tokens = default_max_tokens
        # For requests without a seed. It is fixed here, so that a resumed request samples the same tokens.
        self._seeds = random.Random(seed)
        self._template: ChatTemplate | None = None
        self._dry_breakers = DryBreakers(tokenizer, vocab_size)

    def _has_new_breakers(self, params: SamplingParams) -> bool:
        """Whether the vocabulary has to be searched for its sequence breakers."""
        return bool(params.dry_multiplier and self._dry_breakers.num_new(params.dry_sequence_breakers))

    async def prepare_off_loop(self, request: GenerateRequest) -> Request:
        """The same as `prepare`, in a thread if it takes long."""
        texts = [request.prompt, request.messages, request.template_options, request.params.bad_words]
        if _are_short(texts) and not self._has_new_breakers(request.params):
            try:
                with render_budget(RenderBudget(SHORT_RENDER_SECONDS)):
                    return self.prepare(request)
            except RenderTooLong:
                pass  # not in so little time
        return await asyncio.to_thread(self.prepare, request)

    def prepare(self, request: GenerateRequest) -> Request:
        now = time.monotonic()
        ids = self.encode(request)
        params = self._complete_params(request.params)
        if params.structured is not None or params.thinking_token_budget is not None:
            params.thinking = self._thinking(params, request, ids)
        if params.max_tokens is None and self._default_max_tokens is not None:
            params.max_tokens = max(min(self._default_max_tokens, self.max_model_len - len(ids)), 1)
        if request.window is not None:
            room = max(request.window - len(ids), 1)
            params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._check_length(len(ids), params, request.window)
        for tokens in request.delivered:
            self._check_ids("delivered", tokens)
        return Request(
            id=request.id,
            prompt_ids=ids,
            params=params,
            eos_ids=sorted(self.tokenizer.eos_ids),
            start_ids=self._decoder_start(request.decoder_prompt),
            tenant=request.tenant,
            salt=request.salt,
            adapter=request.adapter,
            priority=request.priority,
            weight=request.weight,
            arrival=now,
            deadline=None if request.timeout is None else now + request.timeout,
        )

    def _decoder_start(self, given: str | None) -> list[int]:
        """What the decoder begins with: the model's start token, then the given prompt or the forced tokens."""
        if self.seq2seq is None:
            if given is not None:
                raise BadRequest("this model has no encoder, and continues the prompt", param="decoder_prompt")
            return []
        first, *forced = self.seq2seq.start_ids
        ids = forced if given is None else self.tokenizer.encode(given, add_special_tokens=False)
        self._check_ids("decoder_prompt", ids)
        return ids if ids[:1] == [first] else [first, *ids]

    def encode(self, request: GenerateRequest) -> list[int]:
        """The prompt's ids, whichever way it was given."""
        if request.prompt_ids is not None:
            ids = request.prompt_ids
        elif request.messages is not None:
            ids = self._tokenize(self.render(request), bool(request.add_special_tokens), request)
        else:
            assert request.prompt is not None, "a request has a prompt, ids or messages"
            ids = self._tokenize(request.prompt, request.add_special_tokens is not False, request)
        if (kept := request.truncate_prompt_tokens) is not None:
            ids = ids[:kept] if request.truncate_end else ids[-kept:]
        if not ids:
            raise BadRequest("the prompt is empty", "give at least one token", param="prompt")
        self._check_ids("prompt", ids)
        return ids

    def _tokenize(self, text: str, add_special_tokens: bool, request: GenerateRequest) -> list[int]:
        """The tokens of a text, of which `request` may want to keep some. A text that is far too long is refused after
        a part of it is tokenized."""
        if (num_kept := request.truncate_prompt_tokens) is not None:
            num_characters = MAX_TOKEN_LENGTH * (num_kept + SPARE_TOKENS)
            text = text[:num_characters] if request.truncate_end else text[-num_characters:]
        check_characters(text, self.max_model_len)
        size = USUAL_TOKEN_LENGTH * self.max_model_len
        while num_kept is None and size < len(text):
            num_tokens = len(self.tokenizer.encode(text[:size], add_special_tokens=False))
            if num_tokens > self.max_model_len + SPARE_TOKENS:
                raise PromptTooLong(
                    f"the first {size} of {len(text)} characters of the prompt have {num_tokens} tokens, "
                    f"and the context holds {self.max_model_len}",
                    "shorten the prompt, or set truncate_prompt_tokens",
                    param="prompt",
                )
            size *= 4
        return self.tokenizer.encode(text, add_special_tokens)

    def render(self, request: GenerateRequest) -> str:
        assert request.messages is not None
        if request.chat_template is not None:
            special = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            return ChatTemplate(request.chat_template, *special).render(request.messages, **request.template_options)
        if self._template is None:
            if not self.tokenizer.chat_template:
                raise BadRequest(
                    "this model has no chat template", "use completions, or a model made for chat", param="messages"
                )
            self._template = ChatTemplate(
                self.tokenizer.chat_template, self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            )
        return self._template.render(request.messages, **request.template_options)

    def _complete_params(self, params: SamplingParams) -> SamplingParams:
        """With a seed, with bad words and sequence breakers as ids, and with the defaults of structured output; token
        ids checked against the vocabulary."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        if (num_allowed := len(params.allowed_token_ids or ())) > self.vocab_size:
            raise BadRequest(
                f"allowed_token_ids has {num_allowed} ids, and the vocabulary {self.vocab_size}",
                param="allowed_token_ids",
            )
        for sequence in params.bad_token_ids:
            if not sequence:
                raise BadRequest("bad_token_ids has an empty sequence", param="bad_token_ids")
            self._check_ids("bad_token_ids", sequence)
        bad_ids = list(params.bad_token_ids)
        if self.seq2seq:
            bad_ids += [list(sequence) for sequence in self.seq2seq.bad_words_ids]
        known = set(map(tuple, bad_ids))
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):  # at the beginning of a text, and inside it
                ids = self.tokenizer.encode(spelling, add_special_tokens=False)
                self._check_ids("bad_words", ids)
                if ids and tuple(ids) not in known:
                    known.add(tuple(ids))
                    bad_ids.append(ids)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        breakers = self._dry_breakers.find(params.dry_sequence_breakers) if params.dry_multiplier else []
        structured = params.structured and params.structured.with_defaults(self._structured_defaults)
        return replace(params, seed=seed, bad_token_ids=bad_ids, dry_breaker_ids=breakers, structured=structured)

    def _thinking(self, params: SamplingParams, request: GenerateRequest, ids: list[int]) -> Thinking | None:
        """Reasoning that has a budget, or that comes before structured output."""
        if params.structured is not None:
            return self._thinking_before_answer(params, request, ids)
        reasoning = request.reasoning or chat_format(self.tokenizer.chat_template or "").reasoning
        asked = f"thinking_token_budget is {params.thinking_token_budget}"
        if reasoning is None:
            raise BadRequest(
                f"{asked}, and this model marks no reasoning", "leave it out", param="thinking_token_budget"
            )
        begin, end_id = reasoning.begin.strip(), reasoning.end_id(self.tokenizer.id_of)
        if end_id is None or end_id >= self.vocab_size:
            raise BadRequest(
                f"{asked}, and this model ends its reasoning with `{reasoning.end.strip()}`, which is not one token",
                "leave it out, or set reasoning_effort",
                param="thinking_token_budget",
            )
        begin_id = self.tokenizer.encode(begin, add_special_tokens=False)[0]
        begun = reasoning.always or prompt_tail(ids, self.tokenizer).rstrip().endswith(begin)
        return Thinking(begin_id, (end_id,), begun, params.thinking_token_budget)

    def _thinking_before_answer(
        self, params: SamplingParams, request: GenerateRequest, ids: list[int]
    ) -> Thinking | None:
        """The reasoning that may precede structured output; None: this holds from the first token."""
        reasoning = request.reasoning
        if params.enable_in_reasoning is False and reasoning is None:
            reasoning = chat_format(self.tokenizer.chat_template or "").reasoning
        if reasoning is None or params.enable_in_reasoning:
            return None
        options = request.template_options
        thinking = thinking_before_answer(reasoning, ids, options, self.tokenizer, self.vocab_size)
        return thinking and replace(thinking, tokens=params.thinking_token_budget)

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        for token in (min(ids), max(ids)) if ids else ():  # quicker than a loop over all
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"{name} has token id {token}, and the vocabulary has {self.vocab_size}", param=name)

    def _check_length(self, num_prompt: int, params: SamplingParams, window: int | None) -> None:
        num_output = params.max_tokens or 1
        limit = min(window or self.max_model_len, self.max_model_len)
        if num_prompt + num_output > limit:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens and {num_output} are asked for, and the context holds {limit}",
                "shorten the prompt, lower max_tokens, or set truncate_prompt_tokens",
                param="max_tokens" if num_prompt < limit else "prompt",
            )


def _are_short(values: list[Any]) -> bool:
    """Whether all texts in the values together are. Looks at no more than that takes."""
    left, rest = LONG_TEXT, values
    while rest and left >= 0:
        value = rest.pop()
        left -= len(value) if isinstance(value, str) else 8
        if isinstance(value, dict):
            rest += [*islice(value.keys(), left), *islice(value.values(), left)] if left > 0 else ()
        elif isinstance(value, list):
            rest += value[:left] if left > 0 else ()
    return left >= 0

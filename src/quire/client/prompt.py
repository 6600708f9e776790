"""Text becomes ids: a GenerateRequest becomes a Request that the scheduler can take."""

import random
import time
from collections.abc import Iterable
from dataclasses import replace

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, PromptTooLong
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.seq2seq import Seq2Seq
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.tokenizer import Tokenizer

LONGEST_TOKEN = 256  # letters; 128 spaces are one token for some


class Prompter:
    """Renders, tokenizes and checks. What it lets through, the scheduler can serve."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        seed: int | None = None,
        seq2seq: Seq2Seq | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size  # the model's: a tokenizer may know more tokens than it, or fewer
        self.max_model_len = max_model_len
        self.seq2seq = seq2seq
        self._seeds = random.Random(
            seed
        )  # for requests that bring none; fixed then, so that a resumed one draws the same
        self._template: ChatTemplate | None = None

    def prepare(self, request: GenerateRequest) -> Request:
        now = time.monotonic()
        ids = self.encode(request)
        params = self._complete(request.params)
        if request.window is not None:
            room = max(request.window - len(ids), 1)
            params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._check_length(len(ids), params, request.window)
        return Request(
            id=request.id,
            prompt_ids=ids,
            params=params,
            eos_ids=sorted(self.tokenizer.eos_ids),
            start_ids=self._start(request.decoder_prompt),
            tenant=request.tenant,
            salt=request.salt,
            adapter=request.adapter,
            priority=request.priority,
            arrival=now,
            deadline=None if request.timeout is None else now + request.timeout,
        )

    def _start(self, given: str | None) -> list[int]:
        """What an answer begins with: the model's start token, and what was given, or else is forced."""
        if self.seq2seq is None:
            if given is not None:
                raise BadRequest("this model reads no source, and continues the prompt", param="decoder_prompt")
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
            ids = self.tokenizer.encode(self._possible(self.render(request)), add_special_tokens=False)
        else:
            assert request.prompt is not None, "a request has a prompt, ids or messages"
            ids = self.tokenizer.encode(self._possible(request.prompt), request.add_special_tokens)
        if request.truncate_prompt_tokens is not None:
            ids = ids[-request.truncate_prompt_tokens :]
        if not ids:
            raise BadRequest("the prompt is empty", "give at least one token", param="prompt")
        self._check_ids("prompt", ids)
        return ids

    def _possible(self, text: str) -> str:
        """Tokenizing megabytes takes seconds, which a text that cannot fit is not worth."""
        if len(text) > LONGEST_TOKEN * self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(text)} letters, and the context holds {self.max_model_len} tokens",
                "shorten the prompt",
                param="prompt",
            )
        return text

    def render(self, request: GenerateRequest) -> str:
        assert request.messages is not None
        if self._template is None:
            if not self.tokenizer.chat_template:
                raise BadRequest(
                    "this model has no chat template", "use completions, or a model made for chat", param="messages"
                )
            self._template = ChatTemplate(
                self.tokenizer.chat_template, self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            )
        return self._template.render(request.messages, **request.template_options)

    def _complete(self, params: SamplingParams) -> SamplingParams:
        """With a seed, and with bad words as ids; token ids checked against the vocabulary."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        for sequence in params.bad_token_ids:
            if not sequence:
                raise BadRequest("bad_token_ids has an empty sequence", param="bad_token_ids")
            self._check_ids("bad_token_ids", sequence)
        banned = list(params.bad_token_ids)
        if self.seq2seq:
            banned += [list(sequence) for sequence in self.seq2seq.bad_words_ids]
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):  # at the beginning of a text, and inside it
                ids = self.tokenizer.encode(spelling, add_special_tokens=False)
                self._check_ids("bad_words", ids)
                if ids and ids not in banned:
                    banned.append(ids)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return replace(params, seed=seed, bad_token_ids=banned)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"{name} has token id {token}, and the vocabulary has {self.vocab_size}", param=name)

    def _check_length(self, num_prompt: int, params: SamplingParams, window: int | None) -> None:
        num_output = params.max_tokens or 1
        most = min(window or self.max_model_len, self.max_model_len)
        if num_prompt + num_output > most:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens and {num_output} are asked for, and the context holds {most}",
                "shorten the prompt, lower max_tokens, or set truncate_prompt_tokens",
                param="max_tokens" if num_prompt < most else "prompt",
            )

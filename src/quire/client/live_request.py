"""A request in flight, on the text side: what has been delivered of each sample, and when."""

import time
from dataclasses import replace

from quire.core.records import RequestRecord
from quire.core.request import DraftUsage, FinishReason, Request, SequenceEvent
from quire.text.event import TextEvent
from quire.text.stream import CompletionText
from quire.text.tokenizers.tokenizer import Tokenizer


class LiveRequest:
    """Turns the engine's events into text events. `finished` after exactly one final text event.

    It keeps every token it delivered: `resumption()` is the same request from that point on, for a new engine.
    Randomness depends on position only, and mirostat's mu is kept, so the output is the same."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.finished = False
        self.record: RequestRecord | None = None  # once finished
        self._tokens: list[list[int]] = [[] for _ in range(request.params.n)]
        self._mu: list[float | None] = [None] * request.params.n
        before = request.start_ids or request.prompt_ids
        self._samples = [CompletionText(tokenizer, request.params, before) for _ in range(request.params.n)]
        self._text_of = self._samples[0].text_of
        self._ended = [False] * request.params.n
        self._num_prompt = len(request.prompt_ids)
        self._num_prompt_logprobs = 0  # delivered
        self._num_repeated = 0  # prompt logprobs to skip after a resumption
        self._num_cached = 0
        self._num_unseen = 0
        self._drafts = DraftUsage()
        self.admitted: float | None = None  # when its first step began
        self._first: float | None = None
        self._last: float | None = None

    def push(self, event: SequenceEvent) -> TextEvent | None:
        """None if there is nothing new. A text event that ends a sample which the engine has not ended (a stop
        string was found) means that the sample has to be cancelled there."""
        if self.finished or self._ended[event.index]:
            return None
        if event.prompt_logprobs:
            event = self._without_repeated(event)
        text = self._samples[event.index].push(event)
        self._tokens[event.index] += text.token_ids
        if event.tokens:
            self._mu[event.index] = event.mu
        self._num_unseen += event.num_unseen
        if event.tokens:
            self._last = time.monotonic()
            self._first = self._first or self._last
        if text.finish_reason:
            self._ended[event.index] = True
        text.num_prompt_tokens = self._num_prompt
        self._num_cached = text.num_cached_tokens = max(event.num_cached, self._num_cached)
        for num_tokens, num_accepted in event.verified:
            self._drafts.add(num_tokens, num_accepted)
        text.drafts = self._drafts if self._drafts.num_tokens else None
        text.final = all(self._ended)
        if text.final:
            assert text.finish_reason
            self._finish(text.finish_reason)
        return text

    def push_tokens(self, tokens: list[int], now: float) -> TextEvent | None:
        """`push` of tokens of the first sample, at time.monotonic(). None if it is not that simple."""
        if self._text_of is None or self.finished or self._ended[0]:
            return None
        self._tokens[0] += tokens
        self._last = now
        if self._first is None:
            self._first = now
        event = TextEvent(0, self._text_of(tokens), tokens)
        event.num_prompt_tokens, event.num_cached_tokens = self._num_prompt, self._num_cached
        if self._drafts.num_tokens:
            event.drafts = self._drafts
        return event

    def admit(self, moment: float) -> None:
        """Note the moment (time.monotonic()) at which the request's first step began."""
        self.admitted = self.admitted or moment

    def fail(self, reason: str, finish_reason: FinishReason = "error") -> TextEvent:
        """End the request from this side."""
        self._finish(finish_reason)
        index = self._ended.index(False)
        return TextEvent(index, finish_reason=finish_reason, reason=reason, final=True)

    def resumption(self) -> Request:
        """The request for a new engine, where `ended_samples` then have to be cancelled."""
        self._num_repeated = self._num_prompt_logprobs
        if not any(self._tokens):
            return replace(self.request, resumed=[], resumed_mu=[])
        return replace(self.request, resumed=[list(tokens) for tokens in self._tokens], resumed_mu=list(self._mu))

    @property
    def ended_samples(self) -> list[int]:
        return [index for index, ended in enumerate(self._ended) if ended]

    def _without_repeated(self, event: SequenceEvent) -> SequenceEvent:
        """Without prompt logprobs that were delivered before: a new engine computes all of them."""
        assert event.prompt_logprobs is not None
        known = min(self._num_repeated, len(event.prompt_logprobs))
        self._num_repeated -= known
        self._num_prompt_logprobs += len(event.prompt_logprobs) - known
        return replace(event, prompt_logprobs=event.prompt_logprobs[known:] or None)

    def _finish(self, finish_reason: FinishReason) -> None:
        self.finished = True
        self.record = RequestRecord(
            id=self.request.id,
            finish_reason=finish_reason,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self._num_cached,
            num_output_tokens=sum(map(len, self._tokens)) + self._num_unseen,
            num_samples=len(self._tokens),
            longest_output=max(map(len, self._tokens)),
            max_tokens=self.request.params.max_tokens,
            arrival=self.request.arrival,
            admitted=self.admitted,
            first_token=self._first,
            last_token=self._last,
            finished=time.monotonic(),
            drafts=self._drafts,
        )

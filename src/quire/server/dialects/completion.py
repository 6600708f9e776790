"""A whole completion, folded from the events of a stream."""

import time
from dataclasses import dataclass, field

from quire.core.request import DraftUsage, FinishReason
from quire.text.event import TextEvent, TokenLogprob


@dataclass(slots=True)
class CompletionSample:
    """One sample of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Completion:
    """All samples of one prompt."""

    prompt_ids: list[int]
    samples: list[CompletionSample]
    num_cached_tokens: int = 0
    num_unseen_tokens: int = 0  # of samples that best_of rejected
    drafts: DraftUsage | None = None  # None: no draft token was verified
    first_token: float | None = None  # time.monotonic()
    prompt_logprobs: list[list[TokenLogprob]] | None = None  # for prompt positions 1, 2, ...

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples) + self.num_unseen_tokens

    def add(self, event: TextEvent) -> None:
        sample = self.samples[event.index]
        if event.token_ids and self.first_token is None:
            self.first_token = time.monotonic()
        sample.text += event.text
        sample.token_ids += event.token_ids
        if event.logprobs is not None:
            sample.logprobs = sample.logprobs or []
            sample.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = self.prompt_logprobs or []
            self.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = event.finish_reason, event.stop_reason
        self.num_unseen_tokens += event.num_unseen_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self.drafts = event.drafts or self.drafts

"""Counts the tokens of one call."""

from collections.abc import Iterable
from typing import Any

from quire.core.request import DraftUsage
from quire.server.dialects.completion import Completion
from quire.server.dialects.openai.fields import StreamOptions
from quire.server.dialects.openai.shapes import CompletionMetrics, CompletionObject, CompletionUsage
from quire.text.event import TextEvent


class UsageCounter:
    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = bool(options and options.include_usage)  # a last chunk with no choices has the usage
        self.always = bool(options and options.continuous_usage_stats)  # every chunk has the usage so far
        self._prompt = 0
        self._completion = 0
        self._cached: dict[int, int] = {}  # prompt -> tokens
        self._drafts: dict[int, DraftUsage] = {}  # by prompt

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompt = sum(map(len, prompts))

    def add(self, prompt: int, event: TextEvent) -> None:
        self._completion += len(event.token_ids)
        if event.num_cached_tokens:
            self._cached[prompt] = event.num_cached_tokens
        if event.drafts:
            self._drafts[prompt] = event.drafts

    def usage(self) -> CompletionUsage:
        return CompletionUsage.of(self._prompt, self._completion, sum(self._cached.values()), self._all_drafts())

    def write(self, chunk: CompletionObject[Any]) -> None:
        """Into the last chunk of a stream."""
        chunk.usage = self.usage()
        chunk.metrics = CompletionMetrics.of(self._all_drafts())

    def _all_drafts(self) -> DraftUsage:
        return _sum(self._drafts.values())


def write_usage(answer: CompletionObject[Any], completions: list[Completion]) -> None:
    drafts = _sum(completion.drafts for completion in completions if completion.drafts)
    answer.usage = CompletionUsage.of(
        sum(len(completion.prompt_ids) for completion in completions),
        sum(completion.num_output_tokens for completion in completions),
        sum(completion.num_cached_tokens for completion in completions),
        drafts,
    )
    answer.metrics = CompletionMetrics.of(drafts)


def _sum(all_drafts: Iterable[DraftUsage]) -> DraftUsage:
    total = DraftUsage()
    for drafts in all_drafts:
        total.merge(drafts)
    return total

"""Counts the tokens of one call."""

from quire.server.dialects.completion import Completion
from quire.server.dialects.openai.fields import StreamOptions
from quire.server.dialects.openai.shapes import CompletionUsage
from quire.text.event import TextEvent


class UsageCounter:
    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = bool(options and options.include_usage)  # a last chunk with no choices has the usage
        self.always = bool(options and options.continuous_usage_stats)  # every chunk has the usage so far
        self._prompt = 0
        self._completion = 0
        self._cached: dict[int, int] = {}  # prompt -> tokens

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompt = sum(map(len, prompts))

    def add(self, prompt: int, event: TextEvent) -> None:
        self._completion += len(event.token_ids)
        if event.num_cached_tokens:
            self._cached[prompt] = event.num_cached_tokens

    def usage(self) -> CompletionUsage:
        return CompletionUsage.of(self._prompt, self._completion, sum(self._cached.values()))


def usage_of(completions: list[Completion]) -> CompletionUsage:
    return CompletionUsage.of(
        sum(len(completion.prompt_ids) for completion in completions),
        sum(completion.num_output_tokens for completion in completions),
        sum(completion.num_cached_tokens for completion in completions),
    )

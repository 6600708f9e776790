"""An answer as it is streamed: its text, tokens and times."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.client.generate_request import GenerateRequest
from quire.client.generation_config import GenerationConfig
from quire.core.errors import EngineFailed
from quire.core.request import DraftUsage
from quire.text.event import TextEvent


class TextTokenizer(Protocol):
    @property
    def chat_template(self) -> str | None: ...


class TextEngine(Protocol):
    """What `run` and `chat` need of `LLM`."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def generation(self) -> GenerationConfig: ...

    def stream(self, request: GenerateRequest) -> Iterator[TextEvent]:
        """Closing the iterator cancels the request."""


@dataclass(slots=True)
class PrintedAnswer:
    """The answer so far; also one that was interrupted."""

    text: str = ""
    finish_reason: str = "cancelled"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft: float | None = None  # seconds from the request to the first token
    seconds: float = 0.0  # from the request to the last token
    drafts: DraftUsage | None = None  # None: no draft token was verified
    _asked: float = field(default_factory=time.monotonic)

    def follow(
        self,
        events: Iterator[TextEvent],
        write: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Write the text of every event until `stopped`. Leaving early, for any reason, cancels the request."""
        try:
            for event in events:
                self._take(event)
                if event.text:
                    write(event.text)
                if stopped():
                    break
        finally:
            if close := getattr(events, "close", None):
                close()

    @property
    def tokens_per_second(self) -> float | None:
        """While decoding: the first token counts for prefill, in `ttft`."""
        if self.ttft is None or self.num_output_tokens < 2 or self.seconds <= self.ttft:
            return None
        return (self.num_output_tokens - 1) / (self.seconds - self.ttft)

    def stats(self) -> str:
        parts = [f"{self.num_output_tokens} tokens"]
        if self.ttft is not None:
            parts.append(f"first after {self.ttft * 1000:.0f} ms")
        if (speed := self.tokens_per_second) is not None:
            parts.append(f"{speed:.1f} tok/s")
        cached = f", {self.num_cached_tokens} of them cached" if self.num_cached_tokens else ""
        parts.append(f"prompt {self.num_prompt_tokens}{cached}")
        if self.drafts:
            parts.append(f"{self.drafts.num_accepted} of {self.drafts.num_tokens} draft tokens accepted")
        return " · ".join([*parts, self.finish_reason])

    def as_json(self) -> dict[str, Any]:
        drafts = self.drafts
        accepted = {"draft_tokens": drafts.num_tokens, "accepted_draft_tokens": drafts.num_accepted} if drafts else {}
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "ttft_s": self.ttft,
            "total_s": self.seconds,
            "tokens_per_s": self.tokens_per_second,
            **accepted,
        }

    def _take(self, event: TextEvent) -> None:
        now = time.monotonic() - self._asked
        if event.token_ids:
            self.seconds = now
            if self.ttft is None:
                self.ttft = now
        self.text += event.text
        self.num_output_tokens += len(event.token_ids)
        self.num_prompt_tokens = max(self.num_prompt_tokens, event.num_prompt_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self.drafts = event.drafts or self.drafts
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
        if event.finish_reason in ("error", "cancelled"):
            raise EngineFailed(f"the answer was not finished: {event.reason or event.finish_reason}", "ask again")

"""What `LLM` and `AsyncEngine` return. The names are those vLLM's users know."""

from dataclasses import dataclass, field

from quire.core.records import RequestRecord
from quire.core.request import FinishReason, Request
from quire.text.event import TextEvent, TokenLogprob


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # for each token, by token id
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first position
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestRecord | None = None  # once finished

    @classmethod
    def of(cls, request: Request, prompt: str | None) -> "RequestOutput":
        outputs = [CompletionOutput(index) for index in range(request.params.n)]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [None]
        if request.params.logprobs is not None:
            for output in outputs:
                output.logprobs = []
        return cls(request.id, prompt, request.prompt_ids, outputs, prompt_logprobs)

    def add(self, event: TextEvent) -> None:
        output = self.outputs[event.index]
        output.text += event.text
        output.token_ids += event.token_ids
        if event.logprobs is not None and output.logprobs is not None:
            output.logprobs += [_by_token(row) for row in event.logprobs]
            for row in event.logprobs:  # one by one: a sum depends on its order
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + row[0].logprob
        if event.prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs += [_by_token(row) for row in event.prompt_logprobs]
        if event.cumulative_logprob is not None:
            output.cumulative_logprob = event.cumulative_logprob
        if event.finish_reason:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self.finished = event.final


def _by_token(row: list[TokenLogprob]) -> dict[int, Logprob]:
    return {entry.token_id: Logprob(entry.logprob, entry.rank, entry.text) for entry in row}

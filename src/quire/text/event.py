"""One step of one completion, as text on its way to a client."""

from dataclasses import dataclass, field

from quire.core.errors import QuireError
from quire.core.request import DraftUsage, FinishReason

LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON does not have; OpenAI's API uses the same value


@dataclass(slots=True)
class TokenLogprob:
    token_id: int
    text: str
    bytes: list[int]
    logprob: float
    rank: int

    @property
    def finite_logprob(self) -> float:
        return max(self.logprob, LOWEST_LOGPROB)


@dataclass(slots=True)
class TextEvent:
    index: int  # of the completion
    text: str = ""  # new text; a suffix that may yet become a stop string is held back
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] | None = None  # for each token: itself first, then the alternatives by rank
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    cumulative_logprob: float | None = None
    reason: str = ""  # for cancelled and error
    error: QuireError | None = None  # what its consumer raises
    num_unseen_tokens: int = 0  # of completions that best_of does not return; with the last event
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    drafts: DraftUsage | None = None  # of the request so far; None: no draft token was verified
    final: bool = False  # the request's last event

"""One prompt with its wishes, and what comes back for it."""

from dataclasses import dataclass, field
from typing import Literal

from quire.core.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True, kw_only=True)
class Request:
    """A prompt as ids. It crosses the process boundary as it is and is never changed."""

    id: str
    prompt_ids: list[int]  # of an encoder-decoder: the source
    params: SamplingParams  # with a seed
    eos_ids: list[int] = field(default_factory=list)  # the model's own stop tokens
    start_ids: list[int] = field(default_factory=list)  # of an encoder-decoder: what the answer begins with
    tenant: str = ""  # prefixes are shared within a tenant only
    salt: str = ""  # separates prefixes further
    adapter: str = ""  # which LoRA adapter, by the key it was loaded under; prefixes are shared within one only
    priority: int = 0  # lower runs earlier, under the priority policy
    arrival: float = 0.0  # time.monotonic()
    deadline: float | None = None  # time.monotonic(); past it the request ends as cancelled
    resumed: list[list[int]] = field(default_factory=list)  # tokens already delivered, by sample


@dataclass(slots=True)
class IdLogprob:
    token: int
    logprob: float
    rank: int  # 1 is the most likely token


@dataclass(slots=True, kw_only=True)
class SequenceEvent:
    """What one sample of a request gained in a step, on its way to the client.

    Every sample has exactly one event with a `finish_reason`; exactly one event of a request, its last, is `final`."""

    request_id: str
    index: int  # which sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[IdLogprob]] | None = None  # a list for each token: itself first, then the alternatives by rank
    prompt_logprobs: list[list[IdLogprob]] | None = None  # for prompt positions 1, 2, ... as they are computed
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended it, if one did
    cumulative_logprob: float | None = None  # of the whole sample; for best_of and beams, on its last event
    reason: str = ""  # for cancelled and error: one sentence
    num_unseen: int = 0  # tokens of samples that best_of passed over, on the last event
    num_cached: int = 0  # prompt tokens that came from the prefix cache, known from the first event on
    final: bool = False

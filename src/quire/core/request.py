"""A request, and the events that answer it."""

from dataclasses import dataclass, field
from typing import Literal

from quire.core.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True, kw_only=True)
class Request:
    """A tokenized prompt with its parameters. It crosses the process boundary and is never changed."""

    id: str
    prompt_ids: list[int]  # of an encoder-decoder: the encoder's input
    params: SamplingParams  # the seed is set
    eos_ids: list[int] = field(default_factory=list)  # the model's own stop tokens
    start_ids: list[int] = field(default_factory=list)  # of an encoder-decoder: the decoder's first tokens
    tenant: str = ""  # part of the cache namespace, as are salt and adapter
    salt: str = ""  # chosen by the client
    adapter: str = ""  # the key of its LoRA adapter; "": none
    priority: int = 0  # lower runs earlier, under the policies priority and fair
    weight: float = 1.0  # of its tenant's share, under the policy fair
    arrival: float = 0.0  # time.monotonic()
    deadline: float | None = None  # time.monotonic(); then the request is cancelled
    resumed: list[list[int]] = field(default_factory=list)  # by sample: tokens that another engine has delivered
    resumed_mu: list[float | None] = field(default_factory=list)  # by sample: mirostat's mu after these tokens


@dataclass(slots=True)
class DraftUsage:
    """The draft tokens of a request: what was verified, and what was accepted."""

    num_tokens: int = 0  # draft tokens that were verified
    lengths: list[int] = field(default_factory=list)  # [n]: verifications that accepted n draft tokens

    def add(self, num_tokens: int, num_accepted: int) -> None:
        self.num_tokens += num_tokens
        self.lengths += [0] * (num_accepted + 1 - len(self.lengths))
        self.lengths[num_accepted] += 1

    def merge(self, other: "DraftUsage") -> None:
        self.num_tokens += other.num_tokens
        self.lengths += [0] * (len(other.lengths) - len(self.lengths))
        for length, count in enumerate(other.lengths):
            self.lengths[length] += count

    @property
    def num_verifications(self) -> int:
        return sum(self.lengths)

    @property
    def num_accepted(self) -> int:
        return sum(length * count for length, count in enumerate(self.lengths))


@dataclass(slots=True)
class IdLogprob:
    token: int
    logprob: float
    rank: int  # 1 is the most likely token


@dataclass(slots=True, kw_only=True)
class SequenceEvent:
    """The tokens that one sample of a request gained in a step.

    Every sample has exactly one event with a `finish_reason`; exactly one event of a request, its last, is `final`."""

    request_id: str
    index: int  # of the sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[IdLogprob]] | None = None  # for each token: itself, then the alternatives by rank
    prompt_logprobs: list[list[IdLogprob]] | None = None  # for prompt positions 1, 2, ... as they are computed
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended it, if one did
    cumulative_logprob: float | None = None  # of the whole sample; for best_of and beams, on its last event
    reason: str = ""  # for cancelled and error: one sentence
    mu: float | None = None  # mirostat's, after the tokens: what a resumption needs
    num_unseen: int = 0  # tokens of the samples that best_of dropped, on the last event
    num_cached: int = 0  # prompt tokens from the prefix cache
    verified: list[tuple[int, int]] = field(default_factory=list)  # (draft tokens, accepted ones) of each verification
    final: bool = False

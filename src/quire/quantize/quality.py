"""What quantizing costs: the next-token distributions of two models on the same text, compared token by token."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quantize.device import CPU, Device, Logits
from quire.quantize.floats import Floats
from quire.weights.checkpoint import Checkpoint

MAX_LOGIT_ROWS = 256  # computed at once

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeanWithError:
    """A mean over tokens, with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Doubles) -> "MeanWithError":
        return cls(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Quality:
    """`kl`: of the original's distribution from the other's, in nats; `same_top`: how often both have the same most
    likely token; `perplexity_ratio`: the other's over the original's."""

    num_tokens: int
    perplexity: float  # of the original
    perplexity_ratio: MeanWithError
    kl: MeanWithError
    kl_p99: float
    same_top: MeanWithError

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def last_states(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], device: Device | None = None) -> Logits:
    return (device or CPU()).logits(checkpoint, sequences)


def compare(first: Logits, second: Logits, sequences: Sequence[Sequence[int]]) -> Quality:
    """`first`: the original's. Both forward passes are fp32: what differs is the weights alone."""
    targets = np.concatenate([[*sequence[1:], -1] for sequence in sequences])  # the last token predicts none
    divergences, losses, other_losses, same = [], [], [], []
    for cut in range(0, len(targets), MAX_LOGIT_ROWS):
        end = min(cut + MAX_LOGIT_ROWS, len(targets))
        p, q = (log_softmax(logits.rows(cut, end)) for logits in (first, second))
        shared = min(p.shape[1], q.shape[1])  # some vocabularies are padded
        p, q = p[:, :shared], q[:, :shared]
        divergences.append(np.maximum((np.exp(p) * (p - q)).sum(1, dtype=np.float64), 0))
        same.append((p.argmax(1) == q.argmax(1)).astype(np.float64))
        known = np.flatnonzero(targets[cut:end] >= 0)
        wanted = targets[cut:end][known]
        losses.append(-p[known, wanted].astype(np.float64))
        other_losses.append(-q[known, wanted].astype(np.float64))
    kl, loss = np.concatenate(divergences), np.concatenate(losses)
    difference = MeanWithError.of(np.concatenate(other_losses) - loss)
    ratio = float(np.exp(difference.value))
    return Quality(
        num_tokens=len(kl),
        perplexity=float(np.exp(loss.mean())),
        perplexity_ratio=MeanWithError(ratio, ratio * difference.error),
        kl=MeanWithError.of(kl),
        kl_p99=float(np.quantile(kl, 0.99)),
        same_top=MeanWithError.of(np.concatenate(same)),
    )


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(1, keepdims=True)
    logprobs: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return logprobs

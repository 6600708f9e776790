"""How many drafts a verifier accepts: held-out answers are written again, step by step, with drafts of the head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.train.target import TargetModel
from quire.train.texts import Example
from quire.train.trainable_head import TextBatch, TrainableHead, num_accepted


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`mean_length`: tokens that a step of the verifier gains, its own token and the accepted drafts before it. 1: no
    draft was ever accepted; 1 + num_drafts: all were."""

    num_drafts: int
    num_steps: int
    num_tokens: int
    rates: tuple[float, ...]  # by position: the share of steps in which this draft and those before it were accepted

    @property
    def mean_length(self) -> float:
        return self.num_tokens / max(self.num_steps, 1)

    def __str__(self) -> str:
        rates = " ".join(f"{100 * rate:.0f}" for rate in self.rates)
        return f"{self.mean_length:.3f} tokens a step at {self.num_drafts} drafts (accepted {rates} %)"

    def as_json(self) -> dict[str, Any]:
        return {
            "mean_accepted_length": round(self.mean_length, 4),
            "num_drafts": self.num_drafts,
            "acceptance_by_position": [round(rate, 4) for rate in self.rates],
            "verifier_steps": self.num_steps,
            "verifier_tokens": self.num_tokens,
        }


def measure(
    head: TrainableHead, target: TargetModel, examples: Sequence[Example], num_drafts: int, batch_size: int
) -> Acceptance:
    steps: list[int] = []  # drafts accepted in each
    num_tokens = 0
    for first in range(0, len(examples), batch_size):
        some = examples[first : first + batch_size]
        counts = num_accepted(head, target, TextBatch.of(some, target.device)).tolist()
        for example, accepted in zip(some, counts, strict=True):
            walked = walk(accepted, example.start, len(example.ids))
            steps += walked
            num_tokens += len(example.ids) - 1 - max(example.start, 1) if walked else 0
    rates = [sum(count > draft for count in steps) / max(len(steps), 1) for draft in range(num_drafts)]
    return Acceptance(num_drafts, len(steps), num_tokens, tuple(rates))


def walk(accepted: Sequence[int], start: int, length: int) -> list[int]:
    """The drafts that each step accepts. `accepted[i]`: of start i. The first token comes from the prefill."""
    steps, position = [], max(start, 1)  # the last token that is known
    while position < length - 1:
        steps.append(accepted[position - 1])
        position += 1 + steps[-1]
    return steps

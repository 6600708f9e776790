"""What EAGLE-3 and Medusa have in common: they are taught the target's own distribution, and drafts are counted."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.train.options import TrainError
from quire.train.target import TargetModel, TargetStates
from quire.train.texts import Example

STEP_DECAY = 0.8  # the loss of a draft counts less than that of the one before it


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts padded to one length. `written`: tokens that the model has written."""

    ids: Tensor  # [sequences, length]
    written: Tensor  # [sequences, length] bool

    @classmethod
    def of(cls, examples: Sequence[Example], device: str) -> "TextBatch":
        length = max(len(example.ids) for example in examples)
        ids = torch.zeros(len(examples), length, dtype=torch.int64)
        written = torch.zeros(len(examples), length, dtype=torch.bool)
        for row, example in enumerate(examples):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            written[row, example.start : len(example.ids)] = True
        return cls(ids.to(device), written.to(device))


class TrainableHead(Protocol):
    """A start is a position i of a text: the target has read token i and written token i + 1. Draft `step` of it is
    token i + 2 + step."""

    weights: dict[str, Any]  # what is trained, under its published name
    vocabulary: Tensor  # [draft vocabulary] the token ids that can be drafted, in ascending order
    layers: Sequence[int]  # of the target, whose inputs the head gets

    def drafts(self, ids: Tensor, states: TargetStates) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step, hidden states [sequences, length, hidden] of all starts and the LM head [draft vocabulary,
        hidden]. Tokens before a draft are those of the text: a draft behind a rejected one does not count."""

    def published(self) -> dict[str, Tensor]:
        """All tensors of the checkpoint."""

    def config(self, verifier: str) -> dict[str, Any]:
        """config.json of the checkpoint; `verifier`: the name of the target."""


def loss(head: TrainableHead, target: TargetModel, batch: TextBatch) -> Tensor:
    """The cross-entropy of drafts with the target's distribution, over the tokens that the target has written."""
    states = target.hidden_states(batch.ids, head.layers)
    length = batch.ids.shape[1]
    rows = _starts(batch.written, 0)  # of tokens whose distribution is needed: those before a written one
    row_of = torch.full((batch.ids.numel(),), -1, dtype=torch.int64, device=rows.device)
    row_of[rows + 1] = torch.arange(len(rows), device=rows.device)
    targets = target.probabilities(states.last.flatten(0, 1)[rows + 1], head.vocabulary)
    total: Any = 0.0
    weights = 0.0
    for step, (hidden, lm_head) in enumerate(head.drafts(batch.ids, states)):
        starts = _starts(batch.written, step)
        if step + 2 >= length or not len(starts):
            break
        logprobs = F.linear(hidden.flatten(0, 1)[starts], lm_head).float().log_softmax(dim=-1)
        step_loss = -(targets[row_of[starts + 1 + step]] * logprobs).sum(dim=-1).mean()
        total = total + STEP_DECAY**step * step_loss
        weights += STEP_DECAY**step
    assert weights, "a batch has no token to be drafted"
    return total / weights


def _starts(written: Tensor, step: int) -> Tensor:
    """Flat indices of the starts whose draft `step` is a written token."""
    drafted = torch.zeros_like(written)
    drafted[:, : max(written.shape[1] - 2 - step, 0)] = written[:, 2 + step :]
    return drafted.flatten().nonzero()[:, 0]


def num_accepted(head: TrainableHead, target: TargetModel, batch: TextBatch) -> Tensor:
    """[sequences, length]: how many drafts of each start a verifier accepts that writes this text."""
    with torch.no_grad():
        states = target.hidden_states(batch.ids, head.layers)
        accepted = torch.zeros_like(batch.ids)
        still = torch.ones_like(batch.written)
        for step, (hidden, lm_head) in enumerate(head.drafts(batch.ids, states)):
            drafted = head.vocabulary[F.linear(hidden, lm_head).argmax(dim=-1)]
            still = still & (drafted == shifted(batch.ids, 2 + step, -1)) & shifted(batch.written, 2 + step, False)
            accepted += still
    return accepted


def shifted(values: Tensor, count: int, padding: Any = 0) -> Tensor:
    """values [sequences, length] -> out[:, i] = values[:, i + count]"""
    out = torch.full_like(values, padding)
    if count < values.shape[1]:
        out[:, : values.shape[1] - count] = values[:, count:]
    return out


def frequent_tokens(examples: Iterable[Example], size: int, vocab: int) -> list[int]:
    """The ids that the model writes most often, in ascending order; low ids where it has written too few."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.ids[example.start :])
    chosen = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]]
    unused = (token for token in range(vocab) if token not in counts)
    while len(chosen) < min(size, vocab):
        chosen.append(next(unused))
    return sorted(chosen)


def coverage(examples: Iterable[Example], vocabulary: Iterable[int]) -> float:
    """The share of written tokens that can be drafted."""
    known = set(vocabulary)
    drafted = [token in known for example in examples for token in example.ids[example.start :]]
    return sum(drafted) / max(len(drafted), 1)


def in_fp16(weights: dict[str, Any]) -> dict[str, Tensor]:
    """A copy of weights in fp16, on the CPU."""
    stored = {name: weight.detach().to("cpu", torch.float16).contiguous() for name, weight in weights.items()}
    if broken := [name for name, weight in stored.items() if not weight.isfinite().all()]:
        raise TrainError(f"{broken[0]} is not finite: the training has diverged", "give a lower --learning-rate")
    return stored


def trainable(weights: dict[str, Tensor], device: str) -> dict[str, Any]:
    """A copy of weights in fp32 on the device, with gradients."""
    return {
        name: weight.to(device, torch.float32).detach().clone().requires_grad_() for name, weight in weights.items()
    }

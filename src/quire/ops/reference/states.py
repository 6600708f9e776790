"""Recurrent states in slots: what a segment starts from, and where it leaves the state."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.ops.opset import StateSpec

Segment = tuple[int, int, int, int]  # (first token, end, source slot or -1, target slot)


class TorchStates:
    """conv [layers, slots, taps - 1, channels] and recurrent [layers, slots, *shape], of all state slots."""

    def __init__(self, spec: StateSpec, device: str, num_slots: int | None = None) -> None:
        """`num_slots`: of the spec, if none is given."""
        count = spec.num_slots if num_slots is None else num_slots
        self.conv = torch.zeros(spec.num_layers, count, *spec.conv_shape, device=device)
        self.recurrent = torch.zeros(spec.num_layers, count, *spec.shape, device=device)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.conv, self.recurrent


def segments(states: Sequence[Sequence[int]]) -> Iterator[Segment]:
    """Of `StepBatch.states`."""
    first = 0
    for end, source, target in states:
        yield first, end, source, target
        first = end


def state_in(slots: Tensor, source: int) -> Tensor:
    """A copy of the state in a slot [slots, ...], or zeros."""
    return torch.zeros_like(slots[0]) if source < 0 else slots[source].clone()

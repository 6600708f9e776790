"""Recurrent states in slots: what a segment starts from, and where it leaves the state."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from quire.ops.kv_spec import CHECKPOINT_GROUP, StateSpec

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

    def read(self, slot: int) -> list[Tensor]:
        """conv and recurrent, of all layers"""
        return [page[:, slot] for page in self.pages]

    def write(self, slot: int, states: Sequence[Tensor]) -> None:
        for page, state in zip(self.pages, states, strict=True):
            page[:, slot] = state


class TorchCheckpoints:
    """States in bf16, [layers, slots, ...] as in fp32; or in int8: integers [layers, slots, groups, numbers of a group]
    and scales [layers, slots, groups], of convolutions and of recurrences."""

    def __init__(self, spec: StateSpec, count: int, device: str) -> None:
        self._shapes = spec.conv_shape, spec.shape
        self._is_int8 = spec.checkpoint_dtype == "int8"
        pages: list[Tensor] = []
        for shape in self._shapes:
            if self._is_int8:
                groups = spec.num_layers, count, -(-prod(shape) // CHECKPOINT_GROUP)
                pages.append(torch.zeros(*groups, CHECKPOINT_GROUP, dtype=torch.int8, device=device))
                pages.append(torch.zeros(groups, device=device))
            else:
                pages.append(torch.zeros(spec.num_layers, count, *shape, dtype=torch.bfloat16, device=device))
        self.pages = tuple(pages)

    def read(self, slot: int) -> list[Tensor]:
        """conv and recurrent, of all layers, in fp32"""
        pages = [page[:, slot] for page in self.pages]
        if not self._is_int8:
            return [page.float() for page in pages]
        states = []
        for quants, scales, shape in zip(pages[::2], pages[1::2], self._shapes, strict=True):
            numbers = (quants * scales[..., None]).flatten(1)[:, : prod(shape)]
            states.append(numbers.unflatten(1, shape))
        return states

    def write(self, slot: int, states: Sequence[Tensor]) -> None:
        written = [part for state in states for part in _int8_groups(state)] if self._is_int8 else states
        for page, part in zip(self.pages, written, strict=True):
            page[:, slot] = part


def _int8_groups(state: Tensor) -> tuple[Tensor, Tensor]:
    """[layers, ...] -> integers [layers, groups, numbers of a group], scales [layers, groups]"""
    numbers = state.flatten(1)
    groups = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % CHECKPOINT_GROUP))
    groups = groups.unflatten(1, (-1, CHECKPOINT_GROUP))
    largest = groups.abs().amax(-1)
    finite = largest.isfinite()
    inverse = torch.where(finite & (largest > 1e-30), 127 / largest, 0.0)
    quants = torch.where(finite[..., None], groups * inverse[..., None], 0.0).round().to(torch.int8)
    return quants, torch.where(finite, largest / 127, float("nan"))


def segments(states: Sequence[Sequence[int]]) -> Iterator[Segment]:
    """The segments in `StepBatch.states`."""
    first = 0
    for end, source, target in states:
        yield first, end, source, target
        first = end


def state_in(slots: Tensor, source: int) -> Tensor:
    """A copy of the state in a slot [slots, ...], or zeros."""
    return torch.zeros_like(slots[0]) if source < 0 else slots[source].clone()

"""LoRA adapters of one linear layer, as one rank adds them: all of A, and the rows of B that belong to its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.opset import LoraSlots
from quire.ops.ranks.cuts import Cut
from quire.ops.ranks.forward import RankWeight
from quire.ops.tensors import LoraDelta, PackedWeight


class RankSlots:
    """The layer's weight, or the forward pass, tells which outputs are this rank's: `bind`, before adapters are
    packed."""

    def __init__(self, new_slots: Callable[[Sequence[int]], LoraSlots], sizes: Sequence[int]) -> None:
        """`new_slots`: the backend's, for a layer whose parts have these sizes here."""
        self._new_slots, self._sizes = new_slots, sizes
        self._rows: list[NDArray[np.int32]] = []  # of each part: this rank's
        self._slots: Any = None

    def bind(self, cuts: Sequence[Cut]) -> LoraSlots:
        if self._slots is None:
            starts = [0, *accumulate(cut.total for cut in cuts)]
            owned = np.arange(sum(self._sizes), dtype=np.int32)
            if cuts:
                own = zip(cuts, starts, strict=False)
                owned = np.concatenate([np.arange(cut.count, dtype=np.int32) + start + cut.first for cut, start in own])
            bounds = pairwise([0, *accumulate(self._sizes)])
            self._rows = [owned[(owned >= first) & (owned < end)] - first for first, end in bounds]
            self._slots = self._new_slots([len(rows) for rows in self._rows])
        slots: LoraSlots = self._slots
        return slots

    def pack(self, parts: Sequence[LoraDelta | None]) -> Any:
        assert self._slots is not None, "neither a weight nor a forward pass has told the outputs"
        own = [_own_rows(part, rows) for part, rows in zip(parts, self._rows, strict=True)]
        return self._slots.pack(own)

    def put(self, slot: int, packed: Any) -> None:
        self._slots.put(slot, packed)


def bind_slots(slots: Mapping[PackedWeight, LoraSlots]) -> None:
    """Before any forward pass. Weights of other stages are none of a rank's: they stay as they are."""
    for w, of_layer in slots.items():
        if isinstance(w, RankWeight) and isinstance(of_layer, RankSlots):
            of_layer.bind(w.cuts)


def _own_rows(part: LoraDelta | None, rows: NDArray[np.int32]) -> LoraDelta | None:
    return None if part is None or not len(rows) else replace(part, b=part.b.ordered(rows))

"""Values that ranks compute together: each writes its part to shared memory, waits for the others, and reads all."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.ranks.cuts import Cut

if TYPE_CHECKING:
    from quire.ops.ranks.group import RankGroup

BUFFER_BYTES = 2**32  # of address space, for the largest value


class RankExchange:
    """Two buffers take turns: a rank that writes one has waited until all have read it."""

    def __init__(self, group: "RankGroup") -> None:
        self._group = group
        self._buffers: list[NDArray[np.float32]] = []
        self._turn = 0

    def all_columns(self, x: Tensor, cuts: Sequence[Cut]) -> Tensor:
        """x [T, columns of this rank] -> [T, columns of all]"""
        value = self._next(len(x), sum(cut.total for cut in cuts))
        starts = [0, *accumulate(cut.total for cut in cuts)]
        for part, cut, start in zip(x.split([cut.count for cut in cuts], dim=-1), cuts, starts, strict=False):
            value[:, start + cut.first : start + cut.first + cut.count] = part
        return self._read(value)

    def all_rows(self, x: Tensor, own: Tensor) -> Tensor:
        """x [T, n], of which the rows `own` [T] are this rank's -> [T, n]"""
        value = self._next(*x.shape)
        value[own] = x[own]
        return self._read(value)

    def _next(self, rows: int, columns: int) -> Tensor:
        if not self._buffers:
            self._buffers = [self._group.allocate(BUFFER_BYTES).view(np.float32) for _ in range(2)]
        self._turn = 1 - self._turn
        return torch.from_numpy(self._buffers[self._turn][: rows * columns].reshape(rows, columns))

    def _read(self, value: Tensor) -> Tensor:
        self._group.barrier()
        return value.clone()

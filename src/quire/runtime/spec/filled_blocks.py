"""Which blocks of a method's own KV cache hold keys and values: it does not read all that the target reads."""

from collections.abc import Sequence

import numpy as np

from quire.core.plan import StepPlan
from quire.ops.opset import Int32


class FilledBlocks:
    """For each block, by the target's ids, how many of its leading slots the method has computed for the tokens that
    the target has there."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._counts = np.zeros(num_blocks, np.int32)
        self._host_counts = np.zeros(num_host_blocks, np.int32)
        self._block_size = block_size
        self._copied: set[int] = set()  # in this step

    def move(self, plan: StepPlan) -> None:
        """Blocks were swapped and copied; what comes from the disk is the target's alone."""
        for block, host in plan.swap_out:
            self._host_counts[host] = self._counts[block]
        for host, block in plan.swap_in:
            self._counts[block] = self._host_counts[host]
        for fetch in plan.fetches:
            self._host_counts[[host for _, host in fetch.blocks if host < len(self._host_counts)]] = 0
        for source, target in plan.copies:
            self._counts[target] = self._counts[source]
        self._copied = {target for _, target in plan.copies}

    def begin(self, table: Int32, start: int) -> int:
        """A row begins with the tokens before `start` in the target's cache. -> how many of them are in this one"""
        whole, rest = divmod(start, self._block_size)
        self._counts[table[whole + 1 :]] = 0
        if whole < len(table):
            self._counts[table[whole]] = min(int(self._counts[table[whole]]), rest)
        counts = self._counts[table[: whole + 1]]
        partial = np.flatnonzero(counts < self._block_size)
        first = int(partial[0]) if len(partial) else len(counts)
        return min(start, first * self._block_size + (int(counts[first]) if first < len(counts) else 0))

    def clear(self, blocks: Sequence[int]) -> None:
        """New tokens will be written there."""
        for block in blocks:
            if block not in self._copied:
                self._counts[block] = 0

    def fill(self, table: Int32, num_computed: int) -> None:
        """The row's first `num_computed` tokens, which are known, are computed."""
        blocks = table[: -(-num_computed // self._block_size)]
        ends = num_computed - self._block_size * np.arange(len(blocks), dtype=np.int32)
        self._counts[blocks] = np.maximum(self._counts[blocks], np.minimum(ends, self._block_size))

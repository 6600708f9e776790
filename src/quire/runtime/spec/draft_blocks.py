"""Where the keys and values of drafts lie: in the target's blocks, and behind them in blocks of the row's own."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.ops.opset import Int32, StepBatch
from quire.runtime.batch import BatchRows


@dataclass(frozen=True, slots=True)
class DraftBlocks:
    """Blocks have the ids of the target's, so prefixes, copies and swaps hold for both caches. Drafts that go past a
    row's blocks lie in the row's own, behind all of the target's."""

    num_shared: int  # blocks of the target's cache
    size: int  # tokens of a block
    max_drafts: int  # of a row

    @property
    def _spare(self) -> int:
        """Blocks of a row's own."""
        return -(-(self.max_drafts + 1) // self.size) + 1

    def num_blocks(self, max_rows: int) -> int:
        return self.num_shared + max_rows * self._spare

    def batch(self, rows: BatchRows, pieces: Mapping[int, tuple[int, Int32]]) -> StepBatch:
        """By row: the first position, and the ids from there on. Logits are those of the last token of each."""
        starts = np.array([start for start, _ in pieces.values()], np.int32)
        counts = np.array([len(ids) for _, ids in pieces.values()], np.int32)
        wanted = np.fromiter(pieces, np.int32, len(pieces))
        return self.batch_of(rows, wanted, starts, counts, np.concatenate([ids for _, ids in pieces.values()]))

    def batch_of(
        self, rows: BatchRows, wanted: Int32, starts: Int32, counts: Int32, ids: Int32, ahead: int = 0
    ) -> StepBatch:
        """The same as arrays: counts[i] tokens of row wanted[i], from position starts[i] on; ids of all, side by side.
        Block tables hold `ahead` tokens more."""
        context_lens = starts + counts
        of_row, positions = spread(starts, counts)
        tables = self._tables(rows, wanted, int(context_lens.max()) + ahead)
        ends = np.cumsum(counts, dtype=np.int32)
        seq_starts = np.zeros(len(ends) + 1, np.int32)
        seq_starts[1:] = ends
        return StepBatch(
            ids=ids,
            positions=positions,
            slots=tables[of_row, positions // self.size] * self.size + positions % self.size,
            seq_starts=seq_starts,
            context_lens=context_lens,
            block_tables=tables,
            logit_rows=ends - 1,
        )

    def next(self, tables: Int32, positions: Int32, ids: Int32) -> StepBatch:
        """One token of each sequence."""
        lines = np.arange(len(ids) + 1, dtype=np.int32)
        blocks = tables[lines[:-1], positions // self.size]
        slots = blocks * self.size + positions % self.size
        return StepBatch(ids, positions, slots, lines, positions + 1, tables, lines[:-1])

    def _tables(self, rows: BatchRows, wanted: Int32, longest: int) -> Int32:
        width = -(-longest // self.size)
        columns = np.arange(width, dtype=np.int32)
        past = columns - np.minimum(rows.num_blocks[wanted], width)[:, None]  # [n, width] below 0: the target's
        tables = (self.num_shared + self._spare * wanted)[:, None] + past
        shared = rows.tables[wanted, :width]
        np.copyto(tables[:, : shared.shape[1]], shared, where=past[:, : shared.shape[1]] < 0)
        return tables


def spread(starts: Int32, counts: Int32) -> tuple[Int32, Int32]:
    """The numbers of counts[i] tokens from starts[i] on, side by side. -> i of each token, and its number"""
    if len(counts) == 1:  # a sequence alone waits for the host the most
        numbers = np.arange(counts[0], dtype=np.int32)
        return np.zeros_like(numbers), numbers + starts[0]
    ends = np.cumsum(counts, dtype=np.int32)
    of_token = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return of_token, np.arange(len(of_token), dtype=np.int32) + (starts + counts - ends)[of_token]

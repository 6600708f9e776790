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

    def batch(self, rows: BatchRows, pieces: Mapping[int, tuple[int, Int32]], ahead: int = 0) -> StepBatch:
        """By row: the first position, and the ids from there on. Logits are those of the last token of each. Block
        tables hold `ahead` tokens more."""
        starts = np.array([start for start, _ in pieces.values()], np.int32)
        counts = np.array([len(ids) for _, ids in pieces.values()], np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)])
        tables = self._tables(rows, list(pieces), int((starts + counts).max()) + ahead)
        of_row = np.repeat(np.arange(len(pieces)), counts)
        blocks = tables[of_row, positions // self.size]
        return StepBatch(
            ids=np.concatenate([ids for _, ids in pieces.values()]),
            positions=positions,
            slots=blocks * self.size + positions % self.size,
            seq_starts=np.concatenate([[0], ends]).astype(np.int32),
            context_lens=starts + counts,
            block_tables=tables,
            logit_rows=ends - 1,
        )

    def next(self, tables: Int32, positions: Int32, ids: Int32) -> StepBatch:
        """One token of each sequence."""
        lines = np.arange(len(ids) + 1, dtype=np.int32)
        blocks = tables[lines[:-1], positions // self.size]
        slots = blocks * self.size + positions % self.size
        return StepBatch(ids, positions, slots, lines, positions + 1, tables, lines[:-1])

    def _tables(self, rows: BatchRows, wanted: list[int], longest: int) -> Int32:
        width = -(-longest // self.size)
        tables = np.zeros((len(wanted), width), np.int32)
        for line, row in zip(tables, wanted, strict=True):
            held = min(int(rows.num_blocks[row]), width)
            line[:held] = rows.tables[row, :held]
            own = self.num_shared + row * self._spare
            line[held:] = np.arange(own, own + width - held)
        return tables

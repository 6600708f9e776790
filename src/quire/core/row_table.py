"""The rows of the runner, and which sequence has each."""

from collections.abc import Iterable
from heapq import heappop, heappush

from quire.core.sequence import NEVER, Sequence


class RowTable:
    """A sequence keeps its row until it stops running. The next plan retires the row in the runner.

    A beam search reserves one row for each beam it may have: `num_unreserved` rows are neither taken nor reserved."""

    def __init__(self, num_rows: int) -> None:
        self.num_unreserved = num_rows
        self._retired: list[int] = []  # since the last plan
        self._owners: list[Sequence | None] = [None] * num_rows
        self._free = list(range(num_rows))  # a heap: low rows first

    def __getitem__(self, row: int) -> Sequence:
        """The sequence that has the row."""
        seq = self._owners[row]
        assert seq is not None, f"row {row} is free"
        return seq

    def owners(self) -> list[Sequence | None]:
        """A copy: the sequence of each row now."""
        return self._owners[:]

    def take(self, seq: Sequence, step: int) -> None:
        seq.row = heappop(self._free)
        self._owners[seq.row] = seq
        seq.admitted_step = step

    def take_retired(self) -> list[int]:
        """The rows that were retired since the last call: the runner forgets them with the next plan."""
        retired, self._retired = self._retired, []
        return retired

    def retire(self, seq: Sequence) -> None:
        """Take the row of a sequence away, if it has one."""
        if seq.row >= 0:
            self._owners[seq.row] = None
            self._retired.append(seq.row)
            heappush(self._free, seq.row)
            seq.row = -1
            seq.admitted_step = NEVER
            seq.num_blocks_sent = 0

    def check(self, live: Iterable[Sequence], num_used: int) -> None:
        """Assert every invariant, given all live sequences and how many rows are taken or reserved."""
        taken = {row: seq for row, seq in enumerate(self._owners) if seq is not None}
        assert taken == {seq.row: seq for seq in live if seq.row >= 0}, "a row and its sequence disagree"
        assert sorted([*taken, *self._free]) == list(range(len(self._owners))), "a row is lost"
        left = len(self._owners) - num_used
        assert self.num_unreserved == left, f"{num_used} rows are used, and {self.num_unreserved} unreserved"

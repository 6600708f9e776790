"""Which values of a recording may share memory.

A value lives from the op that makes it to the last op that reads any of its columns. Threads run ahead of each other
between barriers, each on its own rows, and values of different widths put different rows at the same address; so memory
that becomes free is used again only after a barrier."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

ALIGNMENT = 16  # floats: a cache line


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A matrix of one row a token, which one or several values are columns of."""

    columns: int


@dataclass(frozen=True, slots=True)
class Use:
    """What one op does to memory."""

    inputs: Sequence[Storage]
    output: Storage | None
    barrier: bool  # all threads wait for each other before its output is written, and again after
    in_place: Sequence[Storage] = ()  # inputs that the output may overwrite, row by row
    any_rows: bool = False  # it can be done for some rows and not for others


def needed_for_logits(uses: Sequence[Use]) -> set[Storage]:
    """Values that nothing depends on but logits, the last use: only the rows whose logits are wanted need be computed.

    In a prompt that is one row of many, and these are all values behind the last layer's keys and values."""
    needed = {use.output: True for use in uses if use.output is not None}  # by logits, and by nothing else so far
    for use in reversed(uses):
        few = use is uses[-1] or (use.any_rows and use.output is not None and needed[use.output])
        if not few:
            needed.update(dict.fromkeys((*use.inputs, *([use.output] if use.output else [])), False))
    return {storage for storage, few in needed.items() if few}


def place(uses: Sequence[Use], num_rows: int, few: Set[Storage] = frozenset()) -> tuple[dict[Storage, int], int]:
    """-> the offset of every output, and the floats needed by all. Values in `few` have rows of their own."""
    last_use = {storage: index for index, use in enumerate(uses) for storage in (*use.inputs, use.output) if storage}
    offsets: dict[Storage, int] = {}
    arena = _Arena()
    waiting: list[Storage] = []  # dead, but perhaps still being read by a slower thread

    def release(dead: list[Storage]) -> None:
        for storage in dead:
            arena.give(offsets[storage], _size(storage, num_rows))
        dead.clear()

    for index, use in enumerate(uses):
        dying = [s for s in dict.fromkeys((*use.inputs, use.output)) if s and last_use[s] == index]
        if use.barrier:
            release(waiting)
        if use.output is not None and use.output not in offsets:
            alike = (s for s in use.in_place if s.columns == use.output.columns and (s in few) == (use.output in few))
            heir = next((s for s in alike if s in dying), None)
            if heir is not None:
                offsets[use.output] = offsets[heir]
                dying.remove(heir)
            else:
                offsets[use.output] = arena.take(_size(use.output, num_rows))
        waiting += dying
        if use.barrier:
            release(waiting)
    return offsets, arena.size


def _size(storage: Storage, num_rows: int) -> int:
    return -(-storage.columns * num_rows // ALIGNMENT) * ALIGNMENT


class _Arena:
    """A line of memory with holes. A request takes the first hole it fits in, or extends the line."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[tuple[int, int]] = []  # (offset, size), by offset, never touching each other

    def take(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        offset = self.size
        if self._holes and sum(self._holes[-1]) == self.size:
            offset = self._holes.pop()[0]  # the last hole reaches the end: extend from there
        self.size = offset + size
        return offset

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._holes, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._holes = merged

"""Liveness analysis: which values of a recording may share memory.

A value is live from the op that writes it to the last op that reads any of its columns. Between barriers, threads work
on their own rows and may be at different ops, and values of different widths have different rows at the same address.
So memory that becomes free is reused only after a barrier."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

ALIGNMENT = 16  # floats: a cache line


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A matrix with one row per token. Values are columns of it."""

    columns: int


@dataclass(frozen=True, slots=True)
class Use:
    """The values that one op reads and writes."""

    inputs: Sequence[Storage]
    output: Storage | None
    barrier: bool  # there is a barrier before its output is written, and another one after
    in_place: Sequence[Storage] = ()  # inputs that the output may overwrite, row by row
    any_rows: bool = False  # whether the op can run for a subset of the rows


def needed_for_logits(uses: Sequence[Use]) -> set[Storage]:
    """The values that only logits (the last use) depend on: they are computed for rows whose logits are requested.

    In a prefill that is one row of many, and these are all values behind the keys and values of the last layer."""
    needed = {use.output: True for use in uses if use.output is not None}  # only by logits, as far as known
    for use in reversed(uses):
        only_logits = use is uses[-1] or (use.any_rows and use.output is not None and needed[use.output])
        if not only_logits:
            needed.update(dict.fromkeys((*use.inputs, *([use.output] if use.output else [])), False))
    return {storage for storage, only_logits in needed.items() if only_logits}


def assign_offsets(
    uses: Sequence[Use], num_rows: int, logits_only: Set[Storage] = frozenset()
) -> tuple[dict[Storage, int], int]:
    """-> the offset of every output, and the size of the arena in floats.

    Values in `logits_only` have rows of logits, so they do not overwrite values of all tokens in place. Threads divide
    them otherwise: what they are computed from is read by other threads than wrote it, and is not overwritten in place
    either."""
    read_across = {
        storage
        for index, use in enumerate(uses)
        if use.output in logits_only or index == len(uses) - 1
        for storage in use.inputs
        if storage not in logits_only
    }
    last_use = {storage: index for index, use in enumerate(uses) for storage in (*use.inputs, use.output) if storage}
    offsets: dict[Storage, int] = {}
    arena = _Arena()
    waiting: list[Storage] = []  # dead, but a slower thread may still read them

    def release(dead: list[Storage]) -> None:
        for storage in dead:
            arena.free(offsets[storage], _size(storage, num_rows))
        dead.clear()

    for index, use in enumerate(uses):
        dying = [s for s in dict.fromkeys((*use.inputs, use.output)) if s and last_use[s] == index]
        if use.barrier:
            release(waiting)
        if use.output is not None and use.output not in offsets:
            alike = (
                s
                for s in use.in_place
                if s.columns == use.output.columns
                and (s in logits_only) == (use.output in logits_only)
                and s not in read_across
            )
            reused = next((s for s in alike if s in dying), None)
            if reused is not None:
                offsets[use.output] = offsets[reused]
                dying.remove(reused)
            else:
                offsets[use.output] = arena.allocate(_size(use.output, num_rows))
        waiting += dying
        if use.barrier:
            release(waiting)
    return offsets, arena.size


def _size(storage: Storage, num_rows: int) -> int:
    return -(-storage.columns * num_rows // ALIGNMENT) * ALIGNMENT


class _Arena:
    """A first-fit allocator over a growing range of memory."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent

    def allocate(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        offset = self.size
        if self._holes and sum(self._holes[-1]) == self.size:
            offset = self._holes.pop()[0]  # the last hole reaches the end: extend from there
        self.size = offset + size
        return offset

    def free(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._holes, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._holes = merged

"""Rows whose answers have to be in a language: which tokens each may draw next."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import Admission
from quire.core.structured import Structured
from quire.ops.opset import Masks


class Matcher(Protocol):
    """Where one answer stands in its language. It knows ids only."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""

    def write_mask(self, address: int, num_bytes: int) -> bool:
        """A bit for each token that may follow into memory of that length: token t is bit t % 8 of byte t / 8. False:
        there is an error. It may be called while another thread does something else."""

    def advance(self, tokens: Sequence[int]) -> bool:
        """Take in what was drawn. False: it is outside the language."""

    def count_valid(self, tokens: Sequence[int]) -> int:
        """How many of these drafts, the first first, might be drawn next. Nothing is taken in."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens taken in."""


NO_DRAFTS: Mapping[int, Sequence[int]] = {}
Matchers = Callable[[Structured], Matcher]  # at the beginning of an answer in a language that has been compiled


@dataclass(slots=True)
class _Guided:
    """A row, and all of its answer: drafts may leave a matcher where it cannot go back from."""

    matcher: Matcher
    structured: Structured
    tokens: list[int]


class StructuredOutputRows:
    """The matchers of rows. One that is admitted with a part of its answer has it replayed, so that it does not matter
    whether a row was preempted, moved or resumed on the way."""

    def __init__(self, vocab: int, matchers: Matchers) -> None:
        self._num_words = -(-vocab // 32)
        self._matchers = matchers
        self._rows: dict[int, _Guided] = {}

    def admit(self, admission: Admission) -> None:
        structured, tokens = admission.params.structured, admission.tokens[admission.num_prompt :]
        if structured is not None:
            self._rows[admission.row] = _Guided(self._replayed(structured, tokens), structured, tokens)

    def retire(self, row: int) -> None:
        self._rows.pop(row, None)

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        if row in self._rows and tokens:
            self._rows[row].matcher.advance(tokens)
            self._rows[row].tokens += tokens

    def error(self, row: int) -> str:
        """Why nothing more can be drawn for a row."""
        return self._rows[row].matcher.error if row in self._rows else ""

    def count_valid(self, row: int, drafts: Sequence[int]) -> int:
        """How many of these guesses, the first first, might be drawn."""
        return self._rows[row].matcher.count_valid(drafts) if row in self._rows else len(drafts)

    def guides(self, rows: Iterable[int]) -> bool:
        """Whether one of them has a matcher."""
        return not self._rows.keys().isdisjoint(rows)

    def masks(self, rows: Sequence[int], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS) -> Masks | None:
        """For the rows that draw, line by line; None if none of them has a matcher. A row with drafts has a line behind
        its own for each of them: what may follow it."""
        lines: list[int] = []
        line = 0
        for row in rows:
            end = line + 1 + len(drafts.get(row, ()))
            if row in self._rows:
                lines += range(line, end)
            line = end
        if not lines:
            return None
        sheet = _Sheet(len(lines), self._num_words)
        for row in rows:
            if (guided := self._rows.get(row)) is not None:
                self._write(guided, drafts.get(row, ()), sheet)
        return Masks(lines, sheet.bits)

    def _write(self, guided: _Guided, drafts: Sequence[int], sheet: "_Sheet") -> None:
        """One mask, and one more for each draft. The answer stands where it stood before."""
        matcher = guided.matcher
        sheet.add(matcher)
        for place, draft in enumerate(drafts, 1):
            matcher.advance([draft])
            if not sheet.add(matcher):
                guided.matcher = self._replayed(guided.structured, guided.tokens)
                sheet.skip(len(drafts) - place)  # what follows is drawn when it comes to it, if it does
                return
        if drafts:
            matcher.rollback(len(drafts))

    def _replayed(self, structured: Structured, tokens: Sequence[int]) -> Matcher:
        matcher = self._matchers(structured)
        matcher.advance(tokens)
        return matcher


class _Sheet:
    """Masks, written line after line."""

    def __init__(self, num_lines: int, num_words: int) -> None:
        self.bits: NDArray[np.uint32] = np.empty((num_lines, num_words), np.uint32)
        self._line, self._address, self._line_bytes = 0, self.bits.ctypes.data, 4 * num_words

    def add(self, matcher: Matcher) -> bool:
        """False: it is in a state of error, where nothing may be drawn, and `error` says why."""
        written = not matcher.error and matcher.write_mask(
            self._address + self._line * self._line_bytes, self._line_bytes
        )
        if not written:
            self.bits[self._line] = 0
        self._line += 1
        return written

    def skip(self, count: int) -> None:
        self.bits[self._line : self._line + count] = 0
        self._line += count

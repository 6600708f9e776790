"""Rows whose answers have to be in a language: which tokens each may draw next."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quire.core.plan import Admission
from quire.core.structured import Structured
from quire.ops.opset import Masks


class Matcher(Protocol):
    """Where one answer stands in its language. It knows ids only."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""

    def mask(self) -> bytes:
        """A bit for each token that may follow, and perhaps more bits at the end: token t is bit t % 8 of byte t / 8.
        It may be called while another thread does something else."""

    def advance(self, tokens: Sequence[int]) -> bool:
        """Take in what was drawn. False: it is outside the language."""

    def count_valid(self, tokens: Sequence[int]) -> int:
        """How many of these drafts, the first first, might be drawn next. Nothing is taken in."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens taken in."""


Matchers = Callable[[Structured], Matcher]  # at the beginning of an answer in a language that has been compiled


class Guides:
    """The matchers of rows. One that is admitted with a part of its answer has it replayed, so that it does not matter
    whether a row was preempted, moved or resumed on the way."""

    def __init__(self, vocab: int, matchers: Matchers) -> None:
        self._num_words = -(-vocab // 32)
        self._matchers = matchers
        self._rows: dict[int, Matcher] = {}

    def admit(self, admission: Admission) -> None:
        if admission.params.structured is not None:
            matcher = self._rows[admission.row] = self._matchers(admission.params.structured)
            matcher.advance(admission.tokens[admission.num_prompt :])

    def retire(self, row: int) -> None:
        self._rows.pop(row, None)

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        if row in self._rows:
            self._rows[row].advance(tokens)

    def error(self, row: int) -> str:
        """Why nothing more can be drawn for a row."""
        return self._rows[row].error if row in self._rows else ""

    def masks(self, rows: Sequence[int]) -> Masks | None:
        """For the rows that draw, line by line; None if none of them has a matcher."""
        lines = [line for line, row in enumerate(rows) if row in self._rows]
        if not lines:
            return None
        bits = np.empty((len(lines), self._num_words), np.uint32)
        for line, out in zip(lines, bits, strict=True):
            matcher = self._rows[rows[line]]
            # In a state of error it has no mask: nothing may be drawn, and `error` says why.
            out[:] = 0 if matcher.error else np.frombuffer(matcher.mask(), np.uint32, self._num_words)
        return Masks(lines, bits)

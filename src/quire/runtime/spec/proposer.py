"""What the runner asks of a way to guess."""

from collections.abc import Mapping
from typing import Protocol

from quire.ops.opset import Int32


class Proposer(Protocol):
    """A guess may be wrong: it costs time then, and changes nothing."""

    def propose(self, known: Mapping[int, Int32]) -> dict[int, list[int]]:
        """By row, all tokens known of it [n]; they may be looked at until this returns. -> guesses at what follows, for
        the rows that have some"""

    def retire(self, row: int) -> None:
        """What is known of the row from now on belongs to another sequence."""

"""What a grammar, or reasoning, says of the next token: the interface of every matcher."""

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """The state of one sequence in its grammar. It knows ids only."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""

    def write_mask(self, address: int, num_bytes: int) -> bool:
        """Write a bit for each token that may follow: token t is bit t % 8 of byte t / 8. False: there is an error.
        Safe to call while other threads run."""

    def advance(self, tokens: Sequence[int]) -> bool:
        """Consume sampled tokens. False: the grammar does not allow them."""

    def count_valid(self, tokens: Sequence[int]) -> int:
        """How many leading draft tokens the grammar allows. Nothing is consumed."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens consumed."""

"""What users ask of a server: prompts of prose, cut to length in tokens."""

import pydoc_data.topics
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import Ask
from quire.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` in all from `users`; prompts begin with `num_shared` equal tokens, if any, and end differently."""

    name: str
    users: int
    num_requests: int
    num_shared: int
    num_prompt: int  # tokens of a prompt's own
    num_output: int

    def asks(self, prose: list[int], seed: int) -> list[Ask]:
        cuts = _cuts(prose, seed)
        shared = next(cuts)[: self.num_shared]
        return [Ask(shared + next(cuts)[: self.num_prompt], self.num_output) for _ in range(self.num_requests)]


WORKLOADS = (
    Workload("8 users, 128 in, 64 out", 8, 24, 0, 128, 64),
    Workload("8 users, 1,024 shared and 32 own in, 32 out", 8, 24, 1024, 32, 32),
)
WARM_UP = Workload("warm-up", 8, 8, 0, 64, 8)

LONGEST = 1024  # tokens of a cut


def read_prose(model: Path) -> list[int]:
    """The language reference that every Python carries, in the model's tokens."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return Tokenizer.load(model).encode(text, add_special_tokens=False)


def _cuts(prose: list[int], seed: int) -> Iterator[list[int]]:
    """Passages from here and there: another seed, other passages, so that no cache has seen them."""
    rng = random.Random(seed)
    while True:
        begin = rng.randrange(len(prose) - LONGEST)
        yield prose[begin : begin + LONGEST]

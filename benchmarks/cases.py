"""What is asked of an engine in one process, without HTTP. Standard library only: peers' interpreters read this."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Case:
    """`num_seqs` sequences, begun together, of `num_prompt` random tokens each, that draw `num_output` tokens each.

    A rate counts prompt tokens until as many tokens are drawn as there are sequences, or the tokens of steps in which
    every sequence gains one, or all drawn tokens over the whole time."""

    name: str
    num_seqs: int
    num_prompt: int
    num_output: int
    counts: Literal["prompt", "decode", "whole"]


CASES = (
    Case("prefill 512", 1, 512, 1, "prompt"),
    Case("decode 1", 1, 128, 65, "decode"),
    Case("decode 1 at 1,024", 1, 1024, 33, "decode"),
    Case("decode 32", 32, 128, 17, "decode"),
    Case("32 x (128 in, 128 out)", 32, 128, 128, "whole"),
)

MAX_SEQS = max(case.num_seqs for case in CASES)
MAX_LENGTH = 1536  # tokens of a sequence, with room to spare

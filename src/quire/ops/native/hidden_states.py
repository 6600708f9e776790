"""Hidden states that outlive a step, for heads that draft from them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.opset import Float32, Int32, Program


@dataclass(frozen=True, slots=True, eq=False)
class NativeHiddenStates:
    rows: Float32  # [num_rows, columns]

    def put(self, rows: Int32, program: Program, lines: Int32) -> None:
        assert program.kept is not None, "the program keeps no hidden states"
        self.rows[rows] = program.kept[lines]

    def load(self, values: Float32) -> None:
        self.rows[: len(values)] = values


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """Output i of a head is token tokens[i] of a vocabulary of `size`."""

    tokens: NDArray[np.intp]  # numpy's own index type: others are converted at every use
    size: int

    def new_lines(self, count: int) -> Float32:
        return np.full((count, self.size), -np.inf, np.float32)

    def write(self, logits: Float32, lines: Float32) -> None:
        """logits [R, outputs] to lines [R, size]"""
        for line, of_head in zip(lines, logits, strict=True):
            line[self.tokens] = of_head

"""What the runner knows of each row, and how the runs of a step become flat arrays.

Everything lives in arrays of a fixed size, one line a row, so that a step is a few array operations whatever the number
of rows: no list is built token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.plan import Admission, Run
from quire.ops.opset import Int32, StepBatch


@dataclass(slots=True)
class Step:
    """The arrays of a step, and whose logits they yield: a line for each row that draws, then lines of prompts."""

    batch: StepBatch
    drawing: Int32  # [D] rows; line i of the logits belongs to drawing[i]
    scored: list[tuple[int, slice, list[int]]]  # (row, its lines of the logits, the prompt token that followed each)


class Rows:
    """Tokens and block tables of the sequences that hold a row."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # The token drawn at the last position is known too, though never computed: hence one column more.
        self.tokens = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.tables = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self._scored: set[int] = set()  # rows that want logprobs of their prompt

    def admit(self, admission: Admission) -> None:
        row, tokens, blocks = admission.row, admission.tokens, admission.blocks
        assert self.num_known[row] == 0, f"row {row} is taken"
        self.tokens[row, : len(tokens)] = tokens
        self.num_known[row] = len(tokens)
        self.num_prompt[row] = admission.num_prompt
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        if admission.params.prompt_logprobs is not None:
            self._scored.add(row)

    def retire(self, row: int) -> None:
        self.num_known[row] = self.num_blocks[row] = 0
        self._scored.discard(row)

    def append(self, rows: Int32, tokens: Int32) -> None:
        """One drawn token for each row."""
        self.tokens[rows, self.num_known[rows]] = tokens
        self.num_known[rows] += 1

    def step(self, runs: Sequence[Run]) -> Step:
        for run in runs:
            if run.new_blocks:
                self._grow(run.row, run.new_blocks)
        rows = np.array([run.row for run in runs], np.int32)
        starts = np.array([run.start for run in runs], np.int32)
        counts = np.array([run.count for run in runs], np.int32)
        ends = starts + counts
        known = self.num_known[rows]
        assert (ends <= known).all(), "a run goes past what is known of its row"
        assert (ends <= self.num_blocks[rows] * self.block_size).all(), "a run goes past the blocks of its row"

        seq_starts = np.zeros(len(runs) + 1, np.int32)
        np.cumsum(counts, out=seq_starts[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(seq_starts[-1], dtype=np.int32) + np.repeat(starts - seq_starts[:-1], counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        width = -(-int(ends.max()) // self.block_size)

        draws = ends == known
        drawing = rows[draws]
        last_tokens = seq_starts[1:][draws] - 1
        scored, scored_tokens = self._score(runs, seq_starts, len(drawing)) if self._scored else ([], [])
        batch = StepBatch(
            ids=self.tokens[token_rows, positions],
            positions=positions,
            slots=self.tables[token_rows, blocks] * self.block_size + offsets,
            seq_starts=seq_starts,
            context_lens=ends,
            block_tables=self.tables[rows, :width],
            logit_rows=np.concatenate([last_tokens, *scored_tokens]).astype(np.int32),
        )
        return Step(batch, drawing, scored)

    def _grow(self, row: int, blocks: list[int]) -> None:
        held = self.num_blocks[row]
        self.tables[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)

    def _score(
        self, runs: Sequence[Run], seq_starts: Int32, line: int
    ) -> tuple[list[tuple[int, slice, list[int]]], list[Int32]]:
        """Which tokens of the step have a prompt token after them, from logits line `line` on. None of them draws."""
        scored, tokens = [], []
        for run, first in zip(runs, seq_starts.tolist(), strict=False):
            count = min(run.count, int(self.num_prompt[run.row]) - 1 - run.start)
            if run.row not in self._scored or count <= 0:
                continue
            targets = self.tokens[run.row, run.start + 1 : run.start + 1 + count].tolist()
            scored.append((run.row, slice(line, line + count), targets))
            tokens.append(np.arange(first, first + count, dtype=np.int32))
            line += count
        return scored, tokens

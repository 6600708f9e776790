"""Encoder-decoders: the encoder's input of each row, encoded once into the blocks that its table begins with."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from quire.core.plan import Admission, Run
from quire.ops.opset import Int32, Program, StepBatch


class EncoderInputs:
    """Takes the encoder's input off plans, so that the decoder's tokens of a row begin at position 0.

    For the layout of a sequence see core/seq2seq.py."""

    def __init__(self, encoder: Program, num_rows: int, max_source: int, max_tokens: int, block_size: int) -> None:
        self._encoder = encoder
        self._max_tokens = max_tokens  # encoded at once; a longer input is encoded alone
        self._block_size = block_size
        self._ids: list[Int32] = [np.empty(0, np.int32)] * num_rows
        self._lengths = np.zeros(num_rows, np.int32)
        self._tables = np.zeros((num_rows, -(-max_source // block_size)), np.int32)

    def admit(self, admission: Admission) -> Admission:
        row, length = admission.row, admission.num_encoder_tokens
        num_blocks = -(-length // self._block_size)
        num_slots = num_blocks * self._block_size
        self._ids[row] = np.array(admission.tokens[:length], np.int32)
        self._lengths[row] = length
        self._tables[row, :num_blocks] = admission.blocks[:num_blocks]
        return replace(
            admission,
            tokens=admission.tokens[num_slots:],
            num_prompt=admission.num_prompt - num_slots,
            blocks=admission.blocks[num_blocks:],
        )

    def encode(self, runs: Sequence[Run]) -> list[Run]:
        """Encode the inputs that runs begin with. -> the runs of the decoder"""
        decoder_runs, not_encoded = [], []
        for run in runs:
            num_slots = -(-int(self._lengths[run.row]) // self._block_size) * self._block_size
            if run.start < num_slots:
                assert run.start == 0 and run.count >= num_slots, "an encoder input is encoded in one step"
                not_encoded.append(run.row)
            start = max(run.start, num_slots)
            if (count := run.start + run.count - start) > 0:
                decoder_runs.append(replace(run, start=start - num_slots, count=count))
        for rows in self._portions(not_encoded):
            self._encoder.run(self._batch(rows))
        return decoder_runs

    def attach(self, batch: StepBatch, runs: Sequence[Run]) -> None:
        """Add to the batch what each run cross-attends to."""
        rows = [run.row for run in runs]
        batch.source_lens = self._lengths[rows]
        width = -(-int(batch.source_lens.max()) // self._block_size)
        batch.source_tables = np.ascontiguousarray(self._tables[rows, :width])

    def _portions(self, rows: Sequence[int]) -> Iterator[list[int]]:
        portion: list[int] = []
        for row in rows:
            if portion and self._lengths[[*portion, row]].sum() > self._max_tokens:
                yield portion
                portion = []
            portion.append(row)
        if portion:
            yield portion

    def _batch(self, rows: list[int]) -> StepBatch:
        lengths, tables = self._lengths[rows], self._tables[rows]
        places = [np.arange(length, dtype=np.int32) for length in lengths]
        size = self._block_size
        return StepBatch(
            ids=np.concatenate([self._ids[row] for row in rows]),
            positions=np.concatenate(places),
            slots=np.concatenate(
                [table[at // size] * size + at % size for table, at in zip(tables, places, strict=True)]
            ),
            seq_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=lengths,
            block_tables=tables,
            logit_rows=np.empty(0, np.int32),
        )

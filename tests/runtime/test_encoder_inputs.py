"""What is taken off plans for an encoder, and what is left of them."""

import numpy as np

from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run
from quire.ops.opset import StepBatch
from quire.runtime.batch import BatchRows
from quire.runtime.encoder_inputs import EncoderInputs


class Encoder:
    """Notes what it was given."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def run(self, batch: StepBatch) -> None:
        self.batches.append(batch)


def admission(row: int, source: list[int], answer: list[int], blocks: list[int]) -> Admission:
    empty = [0] * (-len(source) % 4)
    return Admission(
        row=row,
        params=SamplingParams(),
        sample=0,
        tokens=[*source, *empty, *answer],
        num_prompt=len(source) + len(empty) + 1,
        blocks=blocks,
        stop_ids=[],
        num_encoder_tokens=len(source),
    )


def test_sources_are_read_where_they_begin_and_answers_begin_at_zero() -> None:
    encoder = Encoder()
    sources, rows = (
        EncoderInputs(encoder, num_rows=4, max_source=12, max_tokens=8, block_size=4),
        BatchRows(4, 32, block_size=4),
    )
    for given in (
        admission(2, [11, 12, 13, 14, 15], [1], [7, 3, 5]),
        admission(0, [21, 22, 23], [1, 8], [4, 6]),
        admission(3, [31] * 12, [1, 9, 9, 9, 9], [0, 1, 2, 8, 9]),  # preempted, and nothing of it was kept
        admission(1, [41], [1, 5, 6], [10, 11]),  # its source was found in the cache
    ):
        rows.admit(sources.admit(given))
    runs = sources.encode([Run(1, 6, 1), Run(2, 0, 9), Run(0, 0, 6), Run(3, 0, 12)])
    assert [(run.row, run.start, run.count) for run in runs] == [(1, 2, 1), (2, 0, 1), (0, 0, 2)]

    first, second = encoder.batches  # no more than 8 tokens together, and one that is longer by itself
    assert first.ids.tolist() == [11, 12, 13, 14, 15, 21, 22, 23]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.slots.tolist() == [28, 29, 30, 31, 12, 16, 17, 18]
    assert first.seq_starts.tolist() == [0, 5, 8] and first.logit_rows.tolist() == []
    assert second.slots.tolist() == list(range(12))

    batch = rows.step(runs).batch
    sources.attach(batch, runs)
    assert batch.ids.tolist() == [6, 1, 1, 8] and batch.positions.tolist() == [2, 0, 0, 1]
    assert batch.slots.tolist() == [46, 20, 24, 25]
    assert batch.source_lens is not None and batch.source_lens.tolist() == [1, 5, 3]
    assert batch.source_tables is not None and batch.source_tables[:, :1].tolist() == [[10], [7], [4]]
    assert batch.source_tables[1].tolist() == [7, 3] and batch.source_tables.dtype == np.int32

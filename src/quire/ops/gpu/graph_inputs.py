"""The arrays that a captured graph reads, and how a step is padded to them."""

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.aligned import StagedArrays
from quire.ops.gpu.states.segments import SegmentInputs
from quire.ops.opset import Int32, StepBatch

Array = TypeVar("Array", Tensor, Int32)


class StepArrays(NamedTuple, Generic[Array]):
    """The arrays of a step with T tokens in S sequences, R of which have logits. All int32."""

    ancestors: Array  # [2 T] pairs that are int64 words; [0]: there are no trees
    ids: Array  # [T], as the others of tokens
    positions: Array
    slots: Array
    adapters: Array
    hidden_rows: Array
    context_lens: Array  # [S]
    logit_rows: Array  # [R]
    seq_starts: Array  # [S + 1]
    block_tables: Array  # [S, W]


class GraphInputs:
    """The arrays of a step of at most T tokens in S sequences, R of which have logits. If it `decodes`, every sequence
    has one token. With `max_queries` above 1, drafts may be trees, and a sequence that has one has at most that many
    tokens; or, if they are `chains`, every sequence has at most that many tokens, and all tokens have logits. Then they
    are trees if they have `branches`."""

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        width: int,
        device: torch.device,
        decodes: bool,
        max_queries: int = 1,
        chains: bool = False,
        branches: bool = False,
        num_rows: int | None = None,  # as many as sequences
        state_taps: int | None = None,
    ) -> None:
        self.num_tokens, self.num_seqs, self.num_rows = num_tokens, num_seqs, num_rows or num_seqs
        self.decodes, self.max_queries, self.chains = decodes, max_queries, chains
        self.trees = max_queries > 1 and (branches or not chains)
        self._width = width
        self.segments: SegmentInputs | None = None
        if state_taps is not None:
            self.segments = SegmentInputs(num_tokens, num_seqs, state_taps, device, decodes)
        words = (2 * num_tokens if self.trees else 0,)
        tokens, seqs = (num_tokens,), (num_seqs,)
        shapes = [words, *[tokens] * 5, seqs, (self.num_rows,), (num_seqs + 1,), (num_seqs, width)]
        self._staged = StagedArrays(shapes, device, self._pad_all)
        self.tensors = StepArrays[Tensor](*self._staged.on_device)

    def _pad_all(self, arrays: list[Int32]) -> None:
        step = StepArrays[Int32](*arrays)
        step.slots[:], step.adapters[:] = -1, -1
        if self.decodes:  # these two stay as they are
            step.logit_rows[:], step.seq_starts[:] = np.arange(self.num_seqs), np.arange(self.num_seqs + 1)

    def send(self, batch: StepBatch) -> None:
        step = StepArrays[Int32](*self._staged.next_host())
        n, s, r = batch.num_tokens, len(batch.context_lens), len(batch.logit_rows)
        step.ids[:n], step.positions[:n], step.slots[:n] = batch.ids, batch.positions, batch.slots
        step.adapters[:n] = -1 if batch.adapters is None else batch.adapters
        step.hidden_rows[:n] = 0 if batch.hidden_rows is None else batch.hidden_rows
        step.slots[n:], step.adapters[n:], step.hidden_rows[n:] = -1, -1, 0
        step.context_lens[:s], step.context_lens[s:] = batch.context_lens, 0
        if batch.ancestors is not None:
            step.ancestors[: 2 * n] = batch.ancestors.view(np.int32)
        if not self.decodes:
            step.seq_starts[: s + 1], step.seq_starts[s + 1 :] = batch.seq_starts, n
            step.logit_rows[:r], step.logit_rows[r:] = batch.logit_rows, 0
        used = min(batch.block_tables.shape[1], self._width)
        step.block_tables[:s, :used] = batch.block_tables[:, :used]
        self._staged.send()
        if self.segments is not None:
            self.segments.send(batch)

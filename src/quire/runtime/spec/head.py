"""Drafts of heads that read the target's hidden states: what all methods with a head have in common."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.core.plan import Admission, Run
from quire.ops.opset import Int32, Program, StepBatch, Value
from quire.ops.row_params import RowParams
from quire.runtime.sampling import row_params
from quire.runtime.spec.proposer import Proposer, ProposerContext
from quire.runtime.spec.taps import with_taps


@dataclass(slots=True)
class HeadRow:
    """A sequence as the head knows it."""

    params: RowParams
    num_prompt: int
    num_read: int = -1  # leading positions whose hidden states it has read; -1: not known before the first run


class HeadProposer(Proposer):
    """Keeps the hidden states of each row's last positions until the token behind them is known.

    Row r has `_window` rows of hidden states: position p is row r * _window + p % _window. Behind them lie a row for
    each row's drafts, and those of the tokens of a step."""

    def __init__(self, context: ProposerContext, num_tokens: int) -> None:
        assert context.head is not None
        self._head, self._num_tokens = context.head, num_tokens
        self._window = num_tokens + 2  # a step's token and drafts, and with async scheduling the next step's token
        self._first_draft = context.max_rows * self._window
        self._first_token = self._first_draft + context.max_rows
        self._max_length = context.size.max_model_len
        self._hidden = context.ops.new_hidden_states(self._first_token + context.max_tokens, self._head.columns)
        self._sampler = context.ops.new_sampler(context.max_rows, context.model.config.vocab)
        self._drafted: dict[int, HeadRow] = {}
        self._steps: list[tuple[int, float]] = []  # (tokens, seconds)

    def tapped(self, forward: Callable[[Any, Any], Value]) -> Callable[[Any, Any], Value]:
        return with_taps(forward, self._head)

    def admit(self, admission: Admission) -> None:
        params = row_params(admission.params, admission.sample, admission.stop_ids)
        if admission.params.beam_width is None:  # which beams survive is not known
            self._drafted[admission.row] = HeadRow(replace(params, num_logprobs=-1), admission.num_prompt)

    def retire(self, row: int) -> None:
        self._drafted.pop(row, None)

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Keep the hidden states of runs that sample: at the end of each, as many as a row has room for."""
        rows: list[Int32] = []
        lines: list[Int32] = []
        for run, last in zip(runs, batch.seq_starts[1:].tolist(), strict=True):
            if run.row in self._drafted and self._samples(run):
                count = min(run.count, self._window)
                positions = np.arange(run.start + run.count - count, run.start + run.count, dtype=np.int32)
                rows.append(self._rows_of(run.row, positions))
                lines.append(np.arange(last - count, last, dtype=np.int32))
        if rows:
            self._hidden.put(np.concatenate(rows), self._target, np.concatenate(lines))

    def take_steps(self) -> list[tuple[int, float]]:
        steps, self._steps = self._steps, []
        return steps

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        texts = {
            row: tokens
            for row, tokens in known.items()
            if row in self._drafted and len(tokens) + counts[row] < self._max_length
        }
        if not texts:
            return {}
        for row, tokens in texts.items():
            self._sampler.admit(row, self._drafted[row].params, tokens.tolist(), self._drafted[row].num_prompt)
        drafts = self._draft(texts, counts)
        for row in texts:
            self._sampler.retire(row)
        return {row: of_row for row, of_row in drafts.items() if of_row}

    def _draft(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """So many drafts of each row, whose tokens are given; the sampler has the row."""
        raise NotImplementedError

    def _draw(self, program: Program, batch: StepBatch, rows: Sequence[int], drafts: dict[int, list[int]]) -> list[int]:
        """One step: a draft for each row, with its own parameters and random numbers -> the rows that have one."""
        begin = time.perf_counter()
        drawn = [one for one in self._sampler.draw(program.run(batch)[: len(rows)], rows) if one.tokens]
        self._steps.append((len(batch.ids), time.perf_counter() - begin))
        for one in drawn:
            drafts[one.row].append(one.tokens[0])
        return [one.row for one in drawn]

    def _samples(self, run: Run) -> bool:
        return bool(run.start + run.count == self._rows.num_known[run.row])

    def _rows_of(self, row: int, positions: Int32) -> Int32:
        """Where the hidden states of a row's positions are kept."""
        return row * self._window + positions % self._window

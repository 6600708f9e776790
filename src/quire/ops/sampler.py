"""The contract of samplers: what each backend's does with a row's logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import SampledRow
from quire.ops.row_params import RowParams
from quire.ops.step_batch import Int32


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be sampled, for some of a step's lines of logits: structured output."""

    lines: Sequence[int]  # [M]
    bits: NDArray[np.uint32]  # [M, ceil(vocab / 32)]: token t is bit t % 32 of word t / 32


class Sampler(Protocol):
    """Samples tokens for rows, and remembers each row's tokens for its penalties.

    A row's logits go through these steps, in this order. Each filter sees what the one before it leaves.

    1. The step's mask.
    2. The watermark; then logit_bias, allowed, banned, min_tokens, no_repeat_ngram.
    3. Repetition, then frequency and presence penalties, then DRY. All edits are in fp32.
    4. The filters in the row's order, by default top_n_sigma; temperature; top_k; top_p; min_p; typical_p; xtc. Or
       temperature and mirostat.
    5. A race picks among the rest (ops/race.py): every token has an exponential number, a function of (seed, sample,
       position, id), and the least number divided by its weight wins. Weights are integers, so sums are exact.

    Ties between logits go to the lower id. NaN counts as -inf. If every token is masked, the best raw logit among those
    that mask and `allowed` permit is taken. Logprobs are those of the raw logits. Candidates have the log_softmax after
    temperature, without the filters; masked tokens are no candidates, but count in its sum.
    docs/sampling.md defines each step."""

    def admit(
        self, row: int, params: RowParams, tokens: Sequence[int] | Int32, num_prompt: int, mu: float | None = None
    ) -> None:
        """Take a free row. `tokens` are the prompt and, after a preemption, the output so far; `mu` is then the one
        that the row's last `SampledRow` had. An id outside the vocabulary is a ValueError (except in stop_ids, where it
        has no effect)."""

    def retire(self, row: int) -> None:
        """Free a row."""

    def admit_all(
        self, rows: Sequence[int], params: Sequence[RowParams], texts: Sequence[Int32], num_prompts: Sequence[int]
    ) -> None:
        """`admit` of several rows at once, as drafts need in every step."""

    def retire_all(self, rows: Sequence[int]) -> None:
        """Free these rows."""

    def draw(self, logits: Any, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        """logits [R, vocab] fp32; line i belongs to rows[i], which differ. `masks` hold for this step alone. A sampled
        token is appended to the row's tokens."""

    def begin(self, logits: Any, rows: Sequence[int], masks: Masks | None = None) -> "Callable[[], list[SampledRow]]":
        """`draw` without waiting: the result waits for the tokens. The next step may run before that."""

    def verify(
        self,
        logits: Any,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> "Callable[[], list[SampledRow]]":
        """`begin` for speculative decoding: rows[i] has a line for its next token and one after each of drafts[i], side
        by side. Its tokens are sampled one after the other, each as `draw` would, as long as they equal the drafts; the
        first that differs is the last. A draft below zero is one that this sampler keeps: ~(row + number * num_rows),
        with number 1 for the first of a row.

        Where parents[i] is not empty, drafts[i] are a tree (core/draft_tree.py): sampling goes on at the line of the
        child whose token was sampled, the first of several."""

    def logprobs(self, logits: Any, targets: Sequence[int], num_top: int) -> list[list[tuple[int, float, int]]]:
        """For prompt logprobs: (id, logprob, rank) of each line's target, then of its `num_top` most likely tokens."""

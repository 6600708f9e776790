"""The sampler in C++ (native/src/sampler.cpp), as a `quire.ops.opset.Sampler`."""

from collections.abc import Callable, Sequence

import numpy as np

from quire.core.plan import SampledRow
from quire.ops.compiled import native
from quire.ops.opset import Float32, Int32, Masks
from quire.ops.row_params import RowParams
from quire.ops.sampled_row import Logprobs, sampled_row


class NativeSampler:
    """Rows are distributed over `num_threads` threads (0: OpenMP's default). Tokens do not depend on the number."""

    def __init__(self, num_rows: int, vocab_size: int, num_threads: int = 0) -> None:
        self._sampler = native.Sampler(num_rows, vocab_size, num_threads)
        self._no_masks = Masks([], np.empty((0, -(-vocab_size // 32)), np.uint32))
        self._mirostat: set[int] = set()  # rows

    def admit(
        self, row: int, params: RowParams, tokens: Sequence[int] | Int32, num_prompt: int, mu: float | None = None
    ) -> None:
        tokens = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        if params.mirostat is None:
            self._sampler.admit(row, params, tokens, num_prompt, 0.0)
            return
        self._sampler.admit(row, params, tokens, num_prompt, params.mirostat.initial_mu if mu is None else mu)
        self._mirostat.add(row)

    def retire(self, row: int) -> None:
        self._sampler.retire(row)
        self._mirostat.discard(row)

    def admit_all(
        self, rows: Sequence[int], params: Sequence[RowParams], texts: Sequence[Int32], num_prompts: Sequence[int]
    ) -> None:
        for one in zip(rows, params, texts, num_prompts, strict=True):
            self.admit(*one)

    def retire_all(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.retire(row)

    def draw(self, logits: Float32, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        masks = masks or self._no_masks
        draws = self._sampler.draw(logits, rows, masks.lines, masks.bits)
        sampled = [sampled_row(row, [draw]) for row, draw in zip(rows, draws, strict=True)]
        if self._mirostat:
            self._add_mu(sampled)
        return sampled

    def begin(self, logits: Float32, rows: Sequence[int], masks: Masks | None = None) -> Callable[[], list[SampledRow]]:
        sampled = self.draw(logits, rows, masks)
        return lambda: sampled

    def verify(
        self,
        logits: Float32,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Callable[[], list[SampledRow]]:
        masks = masks or self._no_masks
        draws = self._sampler.verify(logits, rows, drafts, parents or (), masks.lines, masks.bits)
        sampled = [sampled_row(row, of_row) for row, of_row in zip(rows, draws, strict=True)]
        if self._mirostat:
            self._add_mu(sampled)
        return lambda: sampled

    def _add_mu(self, sampled: list[SampledRow]) -> None:
        for one in sampled:
            if one.row in self._mirostat and one.tokens:
                one.mu = self._sampler.mu(one.row)

    def logprobs(self, logits: Float32, targets: Sequence[int], num_top: int) -> list[Logprobs]:
        logprobs: list[Logprobs] = self._sampler.logprobs(logits, targets, num_top)
        return logprobs

"""The sampler in C++ (native/src/sampler.cpp), as a `quire.ops.opset.Sampler`."""

from collections.abc import Callable, Sequence

import numpy as np

from quire.ops.compiled import native
from quire.ops.opset import Float32, Masks, RowParams, Sample


class NativeSampler:
    """Rows are distributed over `num_threads` threads (0: OpenMP's default). Tokens do not depend on the number."""

    def __init__(self, num_rows: int, vocab_size: int, num_threads: int = 0) -> None:
        self._sampler = native.Sampler(num_rows, vocab_size, num_threads)
        self._no_masks = Masks([], np.empty((0, -(-vocab_size // 32)), np.uint32))

    def admit(self, row: int, params: RowParams, tokens: Sequence[int], num_prompt: int) -> None:
        self._sampler.admit(row, params, tokens, num_prompt)

    def retire(self, row: int) -> None:
        self._sampler.retire(row)

    def draw(self, logits: Float32, rows: Sequence[int], masks: Masks | None = None) -> list[Sample]:
        masks = masks or self._no_masks
        sampled = self._sampler.draw(logits, rows, masks.lines, masks.bits)
        return [Sample(token, logprobs) for token, logprobs in sampled]

    def begin(self, logits: Float32, rows: Sequence[int], masks: Masks | None = None) -> Callable[[], list[Sample]]:
        samples = self.draw(logits, rows, masks)
        return lambda: samples

    def verify(
        self, logits: Float32, rows: Sequence[int], drafts: Sequence[Sequence[int]], masks: Masks | None = None
    ) -> Callable[[], list[list[Sample]]]:
        masks = masks or self._no_masks
        sampled = self._sampler.verify(logits, rows, drafts, masks.lines, masks.bits)
        samples = [[Sample(token, logprobs) for token, logprobs in of_row] for of_row in sampled]
        return lambda: samples

    def logprobs(self, logits: Float32, targets: Sequence[int], num_top: int) -> list[list[tuple[int, float, int]]]:
        logprobs: list[list[tuple[int, float, int]]] = self._sampler.logprobs(logits, targets, num_top)
        return logprobs

"""The sampler in C++ (native/src/sampler.cpp), behind the contract of `quire.ops.opset.Sampler`."""

from collections.abc import Callable, Sequence

from quire.ops.native.library import native
from quire.ops.opset import Draw, Float32, RowParams


class NativeSampler:
    """Rows are spread over `num_threads` threads (0: as OpenMP decides); the tokens do not depend on how many."""

    def __init__(self, num_rows: int, vocab_size: int, num_threads: int = 0) -> None:
        self._sampler = native.Sampler(num_rows, vocab_size, num_threads)

    def admit(self, row: int, params: RowParams, tokens: Sequence[int], num_prompt: int) -> None:
        self._sampler.admit(row, params, tokens, num_prompt)

    def retire(self, row: int) -> None:
        self._sampler.retire(row)

    def draw(self, logits: Float32, rows: Sequence[int]) -> list[Draw]:
        return [Draw(token, logprobs) for token, logprobs in self._sampler.draw(logits, rows)]

    def begin(self, logits: Float32, rows: Sequence[int]) -> Callable[[], list[Draw]]:
        draws = self.draw(logits, rows)
        return lambda: draws

    def logprobs(self, logits: Float32, targets: Sequence[int], num_top: int) -> list[list[tuple[int, float, int]]]:
        found: list[list[tuple[int, float, int]]] = self._sampler.logprobs(logits, targets, num_top)
        return found

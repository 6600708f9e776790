"""What the last stage is to compute, in order. It is computed when a result is awaited: meanwhile, the stages before it
compute their part, and later steps are planned."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.core.plan import SampledRow
from quire.ops.opset import Int32, Masks, Sampler
from quire.ops.row_params import RowParams


class StepQueue:
    def __init__(self) -> None:
        self._waiting: deque[QueuedCall] = deque()

    def put(self, call: Callable[[], Any]) -> "QueuedCall":
        queued = QueuedCall(self, call)
        self._waiting.append(queued)
        return queued

    def run_next(self) -> None:
        self._waiting.popleft().run()


class QueuedCall:
    def __init__(self, queue: StepQueue, call: Callable[[], Any]) -> None:
        self._queue, self._call = queue, call
        self._done = False
        self._value: Any = None

    def run(self) -> None:
        self._value, self._done = self._call(), True

    def result(self) -> Any:
        """All that was put before it is done first."""
        while not self._done:
            self._queue.run_next()
        return self._value


class QueuedLogits:
    """Logits of a step that is not computed yet, or lines of them."""

    def __init__(self, of_step: QueuedCall, lines: slice = slice(None)) -> None:
        self._of_step, self._lines = of_step, lines

    def __getitem__(self, lines: slice) -> "QueuedLogits":
        return QueuedLogits(self._of_step, lines)

    def result(self) -> Any:
        return self._of_step.result()[self._lines]


class QueuedLogprobs:
    """Prompt logprobs of a step that is not computed yet."""

    def __init__(self, call: QueuedCall) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        return iter(self._call.result())


class QueuedSampler:
    """A `Sampler` whose calls wait for the logits they are about."""

    def __init__(self, own: Sampler, queue: StepQueue) -> None:
        self.own, self._queue = own, queue

    def admit(
        self, row: int, params: RowParams, tokens: Sequence[int], num_prompt: int, mu: float | None = None
    ) -> None:
        self._queue.put(lambda: self.own.admit(row, params, tokens, num_prompt, mu))

    def retire(self, row: int) -> None:
        self._queue.put(lambda: self.own.retire(row))

    def admit_all(
        self, rows: Sequence[int], params: Sequence[RowParams], texts: Sequence[Int32], num_prompts: Sequence[int]
    ) -> None:
        kept = [text.copy() for text in texts]
        self._queue.put(lambda: self.own.admit_all(rows, params, kept, num_prompts))

    def retire_all(self, rows: Sequence[int]) -> None:
        self._queue.put(lambda: self.own.retire_all(rows))

    def draw(self, logits: QueuedLogits, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        return self.begin(logits, rows, masks)()

    def begin(
        self, logits: QueuedLogits, rows: Sequence[int], masks: Masks | None = None
    ) -> Callable[[], list[SampledRow]]:
        return self._queue.put(lambda: self.own.draw(logits.result(), rows, masks)).result

    def verify(
        self,
        logits: QueuedLogits,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Callable[[], list[SampledRow]]:
        return self._queue.put(lambda: self.own.verify(logits.result(), rows, drafts, masks, parents)()).result

    def logprobs(self, logits: QueuedLogits, targets: Sequence[int], num_top: int) -> Any:
        return QueuedLogprobs(self._queue.put(lambda: self.own.logprobs(logits.result(), targets, num_top)))

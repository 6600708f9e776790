"""The engine of a model that reads texts: what `Engine` is for one that continues them."""

import time
from collections import deque
from pathlib import Path

import numpy as np

from quire.core.encode_request import EncodeEvent, EncodeInput, EncodeRequest, Task
from quire.core.errors import Unsupported
from quire.core.records import SchedulerStats, StepRecord
from quire.engine.encoder import Encoder, first_numbers
from quire.engine.options import EngineOptions
from quire.executors.protocol import Capacity
from quire.ops.opset import Float32


class _Reading:
    def __init__(self, request: EncodeRequest) -> None:
        self.request = request
        self.next = 0  # the first text that was not read


class EncoderEngine:
    """A step takes one text of each request in turn, until its tokens are enough: who sends a thousand texts waits for
    a thousand, and who sends one waits for one step."""

    def __init__(self, path: Path, options: EngineOptions) -> None:
        self._encoder = Encoder(path, options)
        if self._encoder.num_labels > 1:
            raise Unsupported(
                f"the model tells {self._encoder.num_labels} classes apart, and a score is one number", "use a reranker"
            )
        self._max_tokens, self._max_rows = options.max_num_batched_tokens, options.max_num_seqs
        self.task: Task = "score" if self._encoder.num_labels else "embed"
        self.dimensions = self._encoder.dimensions
        self.capacity = Capacity(
            num_blocks=0,
            num_host_blocks=0,
            vocab_size=self._encoder.config.vocab,
            max_model_len=self._encoder.max_model_len,
            weight_bytes=self._encoder.weight_bytes,
            cache_bytes=0,
        )
        self.record: StepRecord | None = None
        self._turns: deque[_Reading] = deque()
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._turns)

    @property
    def patience(self) -> float | None:
        return 0.0 if self.has_work else None

    def stats(self) -> SchedulerStats:
        return SchedulerStats(waiting=len(self._turns))

    def watch(self, on: bool) -> None:
        """There are no pages to be seen."""

    def snapshot(self) -> None:
        return None

    def submit(self, request: EncodeRequest) -> None:
        self._turns.append(_Reading(request))

    def cancel(self, request_id: str, index: int | None = None) -> list[EncodeEvent]:
        """Nothing is told: whoever cancels knows."""
        self._turns = deque(turn for turn in self._turns if turn.request.id != request_id)
        return []

    def step(self) -> list[EncodeEvent]:
        self.record, begin = None, time.perf_counter()
        expired = self._expire(time.monotonic())
        taken = self._take()
        if not taken:
            return expired
        scheduled = time.perf_counter()
        numbers = self._read([text for _, _, text in taken])
        ran = time.perf_counter()
        events = [self._event(turn, index, row) for (turn, index, _), row in zip(taken, numbers, strict=True)]
        self.record = StepRecord(
            step=self._steps,
            num_tokens=sum(len(text.ids) for _, _, text in taken),
            num_drawn=0,
            schedule_seconds=scheduled - begin,
            run_seconds=ran - scheduled,
            update_seconds=time.perf_counter() - ran,
            scheduler=self.stats(),
        )
        self._steps += 1
        return expired + events

    def stop(self) -> None:
        self._turns.clear()

    def _take(self) -> list[tuple[_Reading, int, EncodeInput]]:
        """What is read next. A text that is longer than a step has one of its own."""
        taken: list[tuple[_Reading, int, EncodeInput]] = []
        num_tokens = 0
        while self._turns and len(taken) < self._max_rows:
            turn = self._turns[0]
            text = turn.request.texts[turn.next]
            num_tokens += len(text.ids)
            if taken and num_tokens > self._max_tokens:
                break
            taken.append((turn, turn.next, text))
            turn.next += 1
            self._turns.popleft()
            if turn.next < len(turn.request.texts):
                self._turns.append(turn)
        return taken

    def _read(self, texts: list[EncodeInput]) -> list[Float32]:
        if self.task == "score":
            return [np.array([score], np.float32) for score in self._encoder.scores(texts)]
        return self._encoder.vectors(texts)

    @staticmethod
    def _event(turn: _Reading, index: int, row: Float32) -> EncodeEvent:
        if turn.request.dimensions is not None:
            row = first_numbers(row, turn.request.dimensions)
        return EncodeEvent(request_id=turn.request.id, index=index, numbers=row.astype("<f4").tobytes())

    def _expire(self, now: float) -> list[EncodeEvent]:
        late = {t.request.id: t for t in self._turns if t.request.deadline is not None and t.request.deadline <= now}
        for request_id in late:
            self.cancel(request_id)
        reason = "the deadline of the request has passed"
        return [EncodeEvent(request_id=name, index=turn.next, reason=reason) for name, turn in late.items()]

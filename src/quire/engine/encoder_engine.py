"""The engine of a model that encodes texts into embeddings or scores."""

import time
from collections import deque
from pathlib import Path

import numpy as np

from quire.core.encode_request import EncodeEvent, EncodeInput, EncodeRequest, Task
from quire.core.errors import Unsupported
from quire.core.records import SchedulerStats, StepRecord
from quire.engine.options import EngineOptions
from quire.engine.start import load_tokenizer, new_encoder, score_tokens
from quire.executors.encoder import truncate_embedding
from quire.executors.protocol import Capacity
from quire.ipc.active_work import STEP, ActiveWork
from quire.ops.opset import Float32


class _EncodeJob:
    def __init__(self, request: EncodeRequest) -> None:
        self.request = request
        self.next = 0  # the first text that is not encoded yet


class EncoderEngine:
    """Implements `EngineLoop`. A step takes one text of each request in turn, up to its token budget: a request of one
    text waits for one step, whatever else is queued."""

    def __init__(self, path: Path, options: EngineOptions, active_work: ActiveWork) -> None:
        self._active_work = active_work
        tokens = score_tokens(path, load_tokenizer(path, options)) if options.task == "score" else None
        self._executor = new_encoder(path, options, tokens=tokens, dies_with_ranks=True)
        if (num_labels := self._executor.num_labels) > 1:
            raise Unsupported(
                f"the model tells {num_labels} classes apart, and a score is one number", "use a reranker"
            )
        self._max_tokens, self._max_rows = options.max_num_batched_tokens, options.max_num_seqs
        self.task: Task = "score" if self._executor.num_labels else "embed"
        self.dimensions = self._executor.dimensions
        self.capacity = Capacity(
            num_blocks=0,
            num_host_blocks=0,
            vocab_size=self._executor.config.vocab,
            max_model_len=self._executor.max_model_len,
            weight_bytes=self._executor.weight_bytes,
            cache_bytes=0,
        )
        self.record: StepRecord | None = None
        self._queue: deque[_EncodeJob] = deque()
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def idle_timeout(self) -> float | None:
        return 0.0 if self.has_work else None

    def stats(self) -> SchedulerStats:
        return SchedulerStats(waiting=len(self._queue))

    def watch(self, on: bool) -> None:
        """An encoder keeps no KV blocks to show."""

    def snapshot(self) -> None:
        return None

    def submit(self, request: EncodeRequest) -> None:
        self._queue.append(_EncodeJob(request))

    def cancel(self, request_id: str, index: int | None = None) -> list[EncodeEvent]:
        """The client that cancels expects no event."""
        self._queue = deque(job for job in self._queue if job.request.id != request_id)
        return []

    def step(self) -> list[EncodeEvent]:
        self.record, begin = None, time.perf_counter()
        expired = self._expire(time.monotonic())
        taken = self._take()
        if not taken:
            return expired
        scheduled = time.perf_counter()
        self._active_work.write(STEP, [(job.request.id, index) for job, index, _ in taken])
        outputs = self._encode([text for _, _, text in taken])
        self._active_work.clear(STEP)
        ran = time.perf_counter()
        events = [self._event(job, index, row) for (job, index, _), row in zip(taken, outputs, strict=True)]
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
        self._queue.clear()
        self._executor.stop()

    def _take(self) -> list[tuple[_EncodeJob, int, EncodeInput]]:
        """The texts of the next step. A text longer than the token budget has a step of its own."""
        taken: list[tuple[_EncodeJob, int, EncodeInput]] = []
        num_tokens = 0
        while self._queue and len(taken) < self._max_rows:
            job = self._queue[0]
            text = job.request.texts[job.next]
            num_tokens += len(text.ids)
            if taken and num_tokens > self._max_tokens:
                break
            taken.append((job, job.next, text))
            job.next += 1
            self._queue.popleft()
            if job.next < len(job.request.texts):
                self._queue.append(job)
        return taken

    def _encode(self, texts: list[EncodeInput]) -> list[Float32]:
        if self.task == "score":
            return [np.array([score], np.float32) for score in self._executor.score(texts)]
        return self._executor.embed(texts)

    @staticmethod
    def _event(job: _EncodeJob, index: int, row: Float32) -> EncodeEvent:
        if job.request.dimensions is not None:
            row = truncate_embedding(row, job.request.dimensions)
        return EncodeEvent(request_id=job.request.id, index=index, numbers=row.astype("<f4").tobytes())

    def _expire(self, now: float) -> list[EncodeEvent]:
        late = {j.request.id: j for j in self._queue if j.request.deadline is not None and j.request.deadline <= now}
        for request_id in late:
            self.cancel(request_id)
        reason = "the deadline of the request has passed"
        return [EncodeEvent(request_id=name, index=job.next, reason=reason) for name, job in late.items()]

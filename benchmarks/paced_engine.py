"""An engine that computes nothing: every sequence gains a random token a step, and a step takes a given time.

    python -m benchmarks.paced_engine serve MILLISECONDS SERVE_FLAGS...       `quire serve` with such an engine

So a server shows what it can keep up with, on a machine that has no GPU: `benchmarks.served --step-ms`."""

import random
import select
import socket
import sys
import time
from collections.abc import Callable

from quire.client.engine_process import EngineProcess
from quire.core.records import SchedulerStats, StepRecord
from quire.core.request import Request, SequenceEvent
from quire.engine import process
from quire.engine.messages import Cancel, EngineAnswered, PingEngine, Ready, StepDone, Submit, decode_to_engine, encode
from quire.executors.protocol import Capacity
from quire.ipc.channel import Channel

NUM_IDS = 2048  # tokens are drawn from FIRST_ID up to this
FIRST_ID = 300


class PacedEngine:
    def __init__(self, channel: Channel, step_seconds: float) -> None:
        self._channel, self._step_seconds = channel, step_seconds
        self._running: dict[str, tuple[Request, int]] = {}  # by id: the request, and how many tokens it has
        self._tokens = random.Random(0).choices(range(FIRST_ID, NUM_IDS), k=1 << 16)
        self._num_steps = 0
        self._report = _report()

    def run(self) -> None:
        due = time.perf_counter()
        while not self._channel.ended:
            timeout = max(0.0, due - time.perf_counter()) if self._running else None
            writers = [self._channel] if self._channel.has_unsent else []
            if any(select.select([self._channel], writers, [], timeout)):
                self._channel.flush()
                for message in self._channel.receive():
                    self._take(message)
            if self._running and time.perf_counter() >= due:
                due = max(due + self._step_seconds, time.perf_counter())
                self._channel.send(encode(self._step()))

    def _take(self, message: bytes) -> None:
        match decode_to_engine(message):
            case Submit(request):
                self._running[request.id] = request, 0
            case Cancel(request_id, _):
                self._running.pop(request_id, None)
            case PingEngine():
                self._channel.send(encode(EngineAnswered()))

    def _step(self) -> StepDone:
        self._num_steps += 1
        events = []
        for number, (name, (request, count)) in enumerate(list(self._running.items())):
            token = self._tokens[(self._num_steps * 31 + number * 7) % len(self._tokens)]
            ended = count + 1 >= (request.params.max_tokens or 0)
            event = SequenceEvent(request_id=name, index=0, tokens=[token], final=ended)
            if ended:
                event.finish_reason = "length"
                del self._running[name]
            else:
                self._running[name] = request, count + 1
            events.append(event)
        stats = SchedulerStats(running=len(events), num_blocks=1, block_size=16)
        record = StepRecord(
            step=self._num_steps, num_tokens=len(events), num_drawn=len(events), schedule_seconds=0.0,
            run_seconds=self._step_seconds, update_seconds=0.0, scheduler=stats,
        )  # fmt: skip
        return self._report(events, record)


def _report() -> Callable[[list[SequenceEvent], StepRecord], StepDone]:
    """An older tree, which is measured beside this one, has no StepReport."""
    return process.StepReport().message if hasattr(process, "StepReport") else StepDone


def run_engine(step_seconds: float, file: int) -> None:
    channel = Channel(socket.socket(fileno=file))
    engine = PacedEngine(channel, step_seconds)
    capacity = Capacity(
        num_blocks=1 << 20, num_host_blocks=0, vocab_size=49152, max_model_len=4096, weight_bytes=1, cache_bytes=1 << 20
    )
    channel.send(encode(Ready(capacity)))
    engine.run()
    channel.close()


def main() -> None:
    if sys.argv[1] == "serve":
        from quire.cli.main import main as quire

        EngineProcess.program = ("-m", "benchmarks.paced_engine", "engine", sys.argv[2])
        sys.argv = ["quire", "serve", *sys.argv[3:]]
        sys.exit(quire())
    run_engine(float(sys.argv[2]) / 1e3, int(sys.argv[3]))


if __name__ == "__main__":
    main()

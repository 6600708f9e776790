"""The engine process: one socket to the server process, and the loop.

Started as `python -m quire.engine.process SOCKET WORK` with two inherited file descriptors. It ends when the other end
of the socket is closed, so it never outlives the process that started it. WORK is the file of its `ActiveWork`."""

import math
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.encode_request import EncodeRequest
from quire.core.errors import QuireError, Unsupported
from quire.core.records import StepRecord
from quire.core.request import Request, SequenceEvent
from quire.engine.adapter_loader import AdapterLoader, load_adapters
from quire.engine.engine import Engine
from quire.engine.messages import (
    Cancel,
    Encode,
    Encoded,
    EngineAnswered,
    EngineIdle,
    ErrorInfo,
    Failed,
    FromEngine,
    LiveSnapshot,
    LoadAdapter,
    PingEngine,
    PrefixCacheReset,
    PrepareGrammars,
    Ready,
    RequestRefused,
    ResetPrefixCache,
    Start,
    StepDone,
    Submit,
    ToEngine,
    UnloadAdapter,
    WatchEngine,
    decode_to_engine,
    encode,
)
from quire.engine.options import SPECULATION, TARGET_ITL_MS, EngineOptions
from quire.engine.protocol import EngineLoop
from quire.engine.start import load_tokenizer, new_executor, task_of
from quire.ipc.active_work import MESSAGE, ActiveWork
from quire.ipc.channel import Channel

CLOSE_TIMEOUT = 1.0  # seconds for the last messages to leave


def main(file: int, work_file: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server process decides when to stop
    os.set_inheritable(file, False)
    active_work = ActiveWork(work_file)
    os.close(work_file)
    channel = Channel(socket.socket(fileno=file))
    server = _Server(channel)
    try:
        start = server.receive(None)
        if start is None:
            return 0
        assert isinstance(start, Start), start
        _load_and_serve(start, server, active_work)
    except Exception as error:
        server.send(Failed(ErrorInfo.of(error)))
        if not isinstance(error, QuireError):
            raise  # our bug: the traceback belongs on stderr
        return 2
    finally:
        channel.close(CLOSE_TIMEOUT)
    return 0


def _load_and_serve(start: Start, server: "_Server", active_work: ActiveWork) -> None:
    path, options = Path(start.path), start.options
    if options.target_itl_ms is None:
        options = replace(options, target_itl_ms=TARGET_ITL_MS)
    if task_of(path, options) == "generate":
        _serve_generation(start, path, options, server, active_work)
    else:
        _serve_encoder(path, options, server, active_work)


def _serve_generation(
    start: Start, path: Path, options: EngineOptions, server: "_Server", active_work: ActiveWork
) -> None:
    executor = new_executor(path, options, dies_with_ranks=True)
    engine = Engine(executor, options, lambda: load_tokenizer(path, options), server.refuse, active_work)
    assert engine.compile_queue is not None
    load_adapters(engine, start.adapters, start.restarted, server.send)
    adapters = AdapterLoader(engine, server.send)
    server.wake_for(engine.compile_queue.fileno())
    server.wake_for(adapters.fileno())
    if executor.transfer is not None:
        server.wake_for(executor.transfer.news.fileno())
    server.send(Ready(engine.capacity))
    _serve(engine, server, StepReport().message, active_work, adapters)
    engine.stop()


def _serve_encoder(path: Path, options: EngineOptions, server: "_Server", active_work: ActiveWork) -> None:
    if options.num_loras:
        raise Unsupported("adapters are for models that generate", "leave out enable_lora and lora_modules")
    if options.speculation:
        raise Unsupported("speculation is for models that generate", f"leave out {', '.join(SPECULATION)}")
    if options.kv_events:
        raise Unsupported("KV events are for models that generate", "leave out kv_events_config")
    if options.kv_transfer:
        raise Unsupported("KV transfers are for models that generate", "leave out kv_transfer_config")
    if options.kv_disk_path:
        raise Unsupported("prefixes on disk are for models that generate", "leave out kv_disk_path")
    from quire.engine.encoder_engine import EncoderEngine

    engine = EncoderEngine(path, options, active_work)
    server.send(Ready(engine.capacity, engine.task, engine.dimensions))
    _serve(engine, server, Encoded, active_work)
    engine.stop()


def _serve(
    engine: EngineLoop,
    server: "_Server",
    report: Callable[[list[Any], StepRecord | None], StepDone | Encoded],
    active_work: ActiveWork,
    adapters: AdapterLoader | None = None,
) -> None:
    """Take messages as they come and step while there is work, until the server process is gone."""
    while not server.gone:
        events: list[Any] = []
        cancelled = False
        message = server.receive(engine.idle_timeout)
        while message is not None:
            match message:
                case Submit(request) | Encode(request):
                    active_work.write(MESSAGE, [(request.id, 0)])
                    try:
                        engine.submit(request)
                    except QuireError as error:
                        server.refuse(request, error)
                    active_work.clear(MESSAGE)
                case Cancel(request_id, index):
                    active_work.write(MESSAGE, [(request_id, index or 0)])
                    events += engine.cancel(request_id, index)
                    active_work.clear(MESSAGE)
                    cancelled = True
                case WatchEngine(on):
                    engine.watch(on)
                case LoadAdapter(key, path) if adapters is not None:
                    adapters.load(key, Path(path))
                case PingEngine():
                    server.send(EngineAnswered())
                case UnloadAdapter(key) if adapters is not None:
                    adapters.unload(key)
                case ResetPrefixCache(tenant) if isinstance(engine, Engine):
                    server.send(PrefixCacheReset(engine.reset_prefix_cache(tenant)))
                case PrepareGrammars() if isinstance(engine, Engine) and engine.compile_queue is not None:
                    engine.compile_queue.warm_up()
            message = server.receive(0.0)
        record = None
        if engine.has_work:
            events += engine.step()
            record = engine.record
        if events or record:
            server.send(report(events, record))
        if (cancelled or events) and record is None and not engine.has_work:
            server.send(EngineIdle(engine.stats()))
        if adapters is not None:
            adapters.update()
        if snapshot := engine.snapshot():
            server.send(LiveSnapshot(snapshot))


class StepReport:
    """Tells the server of steps in few bytes: nearly every event has some tokens of a request, and no more."""

    def __init__(self) -> None:
        self._num_cached: dict[str, int] = {}  # by request: prompt tokens from the prefix cache, as was told last

    def message(self, events: list[SequenceEvent], record: StepRecord | None) -> StepDone:
        tokens: dict[str, list[int]] = {}
        others = []
        for event in events:
            if (
                event.finish_reason is None
                and event.index == 0
                and event.logprobs is None
                and event.prompt_logprobs is None
                and event.mu is None
                and not event.verified
                and event.num_cached == self._num_cached.get(event.request_id, 0)
                and event.request_id not in tokens
            ):
                tokens[event.request_id] = event.tokens
                continue
            others.append(event)
            if event.final:
                self._num_cached.pop(event.request_id, None)
            elif event.num_cached:
                self._num_cached[event.request_id] = event.num_cached
        return StepDone(others, record, tokens)


class _Server:
    """The server process, on the other end of the socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[bytes] = deque()  # received, not decoded
        self._poll = select.poll()

    @property
    def gone(self) -> bool:
        return self._channel.ended

    def wake_for(self, file: int) -> None:
        """`receive` returns when this file becomes readable."""
        self._poll.register(file, select.POLLIN)

    def receive(self, timeout: float | None) -> ToEngine | None:
        """The next message; None after `timeout` seconds, when a file of `wake_for` is readable, or when the server
        process is gone."""
        milliseconds = None if timeout is None else math.ceil(timeout * 1000)
        while not self._messages and not self.gone:
            self._poll.register(self._channel, select.POLLIN | select.POLLOUT * self._channel.has_unsent)
            if self._channel.fileno() not in dict(self._poll.poll(milliseconds)):
                return None
            self._channel.flush()
            self._messages += self._channel.receive()
            if milliseconds is not None:
                break
        return decode_to_engine(self._messages.popleft()) if self._messages and not self.gone else None

    def refuse(self, request: Request | EncodeRequest, error: Exception) -> None:
        self.send(RequestRefused(request.id, ErrorInfo.of(error)))

    def send(self, message: FromEngine) -> None:
        self._channel.send(encode(message))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

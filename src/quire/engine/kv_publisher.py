"""Publishes what the prefix cache gains and loses over ZeroMQ as vLLM does: a PUB socket, a ROUTER to replay."""

import logging
import os
from queue import Queue
from threading import Thread

import zmq

from quire.core.errors import BadRequest
from quire.core.kv_events import KVEvent
from quire.engine.kv_batch_log import BatchLog, Numbered
from quire.engine.kv_events_config import OPTION, KVEventsConfig

log = logging.getLogger("quire.engine")

END = b"\xff" * 8  # instead of the number of a replayed batch: there are no more
SPARE_MESSAGES = 1000  # of a replay, beside the batches that are kept
CLOSE_SECONDS = 1.0


class KVPublisher:
    """`publish` is called by the engine; a thread encodes, sends and answers replays."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        self._log = BatchLog(block_size, config.buffer_steps)
        self._topic = config.topic.encode()
        self._batches: Queue[list[KVEvent] | None] = Queue(config.max_queue_size)
        self._context = zmq.Context()
        self._events = self._socket(zmq.PUB, config.endpoint, config.hwm, config.binds)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint:
            hwm = config.buffer_steps + SPARE_MESSAGES  # a ROUTER drops what is above it
            self._replay = self._socket(zmq.ROUTER, config.replay_endpoint, hwm, True)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, endpoint: str, hwm: int, binds: bool) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.set_hwm(hwm)
        try:
            made.bind(endpoint) if binds else made.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise BadRequest(f"cannot publish KV events on {endpoint}: {error}", param=OPTION) from None
        return made

    def publish(self, events: list[KVEvent]) -> None:
        if events:
            self._batches.put(events)
            os.write(self._wake_write, b".")

    def close(self) -> None:
        self._batches.put(None)
        os.write(self._wake_write, b".")
        self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        self._send(self._log.begin())
        while True:
            ready = dict(poller.poll())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._wake_read in ready:
                os.read(self._wake_read, 1)
                if (events := self._batches.get()) is None:
                    break
                self._send(self._log.append(events))
        self._context.destroy(0)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _send(self, batch: Numbered) -> None:
        number, payload = batch
        self._events.send_multipart((self._topic, number.to_bytes(8), payload))

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a replay was asked for with %d frames, and takes identity, nothing and a number", len(frames))
            return
        listener, empty, start = frames
        for number, payload in self._log.replay(int.from_bytes(start)):
            replay.send_multipart((listener, empty, number.to_bytes(8), payload))
        replay.send_multipart((listener, empty, END, b""))

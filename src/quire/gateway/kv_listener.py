"""Listens to the KV events of one worker over ZeroMQ, and asks it for what is missing."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from quire.gateway.kv_batches import AllBlocksCleared, BadKVBatch, KVBatch, decode_batch
from quire.gateway.kv_follower import BatchFollower, Numbered, ReplayRequest

log = logging.getLogger("quire.gateway")

SNAPSHOT = END = b"\xff" * 8
MAX_MESSAGE_BYTES = 64 << 20
MESSAGES_AT_ONCE = 64  # messages that are read before the loop goes on
MAX_REPLAYED = 200_000  # messages of one answer
ANSWER_SECONDS = 5.0  # between two messages of an answer
CHECK_SECONDS = 2.0  # after so long without a batch, the worker is asked whether one was lost
RETRY_SECONDS = 0.5

Frames = list[bytes]


class EventSocket:
    """A ZeroMQ socket in an asyncio loop: `on_message` is called with the frames of each message."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[Frames], None]) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._file = socket.FD
        self._loop.add_reader(self._file, self.read)
        self._loop.call_soon(self.read)

    def read(self) -> None:
        """The file becomes readable only when something changes: all that is there is read, with pauses for others."""
        for _ in range(MESSAGES_AT_ONCE):
            if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._on_message(self._socket.recv_multipart(zmq.NOBLOCK))
        self._loop.call_soon(self.read)

    def send(self, frames: Frames) -> None:
        self._socket.send_multipart(frames)
        self.read()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._file)
            self._socket.close(0)


class KVListener:
    def __init__(
        self,
        name: str,
        endpoint: str,
        replay: str | None,
        topic: str,
        follower: BatchFollower,
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self.follower = follower
        self._name, self._replay, self._context = name, replay, context
        events = context.socket(zmq.SUB)
        events.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        events.set(zmq.RCVHWM, 10_000)
        events.set(zmq.RECONNECT_IVL, 100)
        events.set(zmq.RECONNECT_IVL_MAX, 2000)
        events.subscribe(topic.encode())
        monitor = events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sockets = [EventSocket(events, self._receive), EventSocket(monitor, self._disconnected)]
        events.connect(endpoint)
        self._changed = asyncio.Event()
        self._num_bad = 0
        self._task = asyncio.create_task(self._repair())

    def _receive(self, frames: Frames) -> None:
        if len(frames) == 3 and len(frames[1]) == 8:
            self.follower.receive(int.from_bytes(frames[1]), self._decode(frames[2]))
            self._changed.set()
        else:
            self._bad(f"it has {len(frames)} frames, and not topic, number and batch")

    def _decode(self, payload: bytes) -> KVBatch:
        """Of a batch that cannot be read it is known only that what was stored before may be gone."""
        try:
            return decode_batch(payload)
        except BadKVBatch as error:
            self._bad(str(error))
            return KVBatch(0.0, [AllBlocksCleared()])

    def _bad(self, why: str) -> None:
        self._num_bad += 1
        if self._num_bad.bit_count() == 1:  # the first, second, fourth, ...
            log.warning("KV events of worker %s that cannot be read: %d; the last: %s", self._name, self._num_bad, why)

    def _disconnected(self, frames: Frames) -> None:
        self.follower.disconnected()
        self._changed.set()

    async def _repair(self) -> None:
        while True:
            self._changed.clear()
            if (request := self.follower.wanted) is None:
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    self.follower.check()
                continue
            answer = await self._ask(request)
            if answer is None:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.follower.answered(request, answer)

    async def _ask(self, request: ReplayRequest) -> Numbered | None:
        """Ask for the batches that were missed; None: there was no whole answer."""
        assert self._replay is not None
        messages: asyncio.Queue[Frames] = asyncio.Queue()
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        asking = EventSocket(socket, messages.put_nowait)
        try:
            socket.connect(self._replay)
            start = SNAPSHOT if request.start is None else request.start.to_bytes(8)
            asking.send([b"", start])
            return await self._collect(messages)
        except TimeoutError:
            return None
        finally:
            asking.close()

    async def _collect(self, messages: asyncio.Queue[Frames]) -> Numbered | None:
        batches: Numbered = []
        while len(batches) < MAX_REPLAYED:
            async with asyncio.timeout(ANSWER_SECONDS):
                frames = await messages.get()
            if len(frames) != 3 or len(frames[1]) != 8:
                self._bad(f"a replayed message has {len(frames)} frames")
                return None
            if frames[1] == END:
                return batches
            batches.append((int.from_bytes(frames[1]), self._decode(frames[2])))
        self._bad(f"a replay has more than {MAX_REPLAYED} messages")
        return None

    def stop(self) -> None:
        """Nothing is applied any more."""
        self._task.cancel()
        for socket in self._sockets:
            socket.close()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(self._task, return_exceptions=True)

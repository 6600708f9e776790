"""Hidden states on their way from a stage to the next.

A frame names the step and the shape of its hidden states. On one machine they lie in memory that both stages map; over
TCP they follow the frame. There are as many slots for them as micro-batches, which steps take in turn. A slot is free
again when the last stage has computed its step, and the step that takes it next does not begin before that."""

import logging
import socket
import struct
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import EngineFailed
from quire.executors.ranks.processes import die_like
from quire.ops.opset import Int32

log = logging.getLogger("quire.stage")

FRAME = struct.Struct("<QII")  # the step, rows, columns
LOOK_INTERVAL = 0.1  # seconds between looks at whether a stage is gone

Rows = NDArray[Any]  # [rows, columns] fp32, or the bits of 16-bit floats


class HiddenSlots:
    """The hidden states of some steps: [slots * max_tokens, columns]."""

    def __init__(self, rows: Rows, num_slots: int) -> None:
        self.rows = rows
        self._slots = rows.reshape(num_slots, -1, rows.shape[1])

    def of_step(self, step: int, num_rows: int) -> Rows:
        slot: Rows = self._slots[step % len(self._slots), :num_rows]
        return slot

    def fits(self, frame: tuple[int, ...]) -> bool:
        """Whether there is room for hidden states of (step, rows, columns)."""
        _, num_rows, columns = frame
        return 1 <= num_rows <= self._slots.shape[1] and columns == self._slots.shape[2]

    def indices(self, step: int, num_rows: int) -> Int32:
        """The rows of a step among all."""
        first = self.first_row(step)
        return np.arange(first, first + num_rows, dtype=np.int32)

    def first_row(self, step: int) -> int:
        return step % len(self._slots) * self._slots.shape[1]


class LinkClosed(Exception):
    """The stage at the other end is gone."""


class Sender(Protocol):
    def send(self, step: int, hidden: Rows) -> None:
        """Hand on the hidden states of a step. Raises LinkClosed."""


class Receiver(Protocol):
    def receive(self, step: int, num_rows: int, check: Callable[[], None] = lambda: None) -> Int32:
        """Wait until the hidden states of a step are there. -> their rows in the slots. `check` is called now and then,
        and raises if waiting is in vain. Raises LinkClosed."""


def sender(end: socket.socket, slots: HiddenSlots) -> Sender:
    return StageLink(end, slots) if end.family == socket.AF_UNIX else TcpSender(end)


def receiver(end: socket.socket, slots: HiddenSlots) -> Receiver:
    return StageLink(end, slots) if end.family == socket.AF_UNIX else TcpReceiver(end, slots)


class RankReceiver:
    """To a stage of several ranks: hidden states go on to memory that all of them map."""

    def __init__(self, received: Receiver, slots: HiddenSlots, of_ranks: HiddenSlots) -> None:
        """`of_ranks`: in that memory."""
        self._received, self._slots, self._of_ranks = received, slots, of_ranks

    def receive(self, step: int, num_rows: int, check: Callable[[], None] = lambda: None) -> Int32:
        self._received.receive(step, num_rows, check)
        self._of_ranks.of_step(step, num_rows)[:] = self._slots.of_step(step, num_rows)
        return self._of_ranks.indices(step, num_rows)


class DeviceSender:
    """From a device with memory of its own. A thread waits for what is copied to the slots, so that the next step is
    launched meanwhile."""

    def __init__(self, sender: Sender, slots: HiddenSlots, take: Callable[[Any, int], Callable[[], None]]) -> None:
        """`take`: queues a copy of rows of the device to those of the slots from a number on -> how to wait for it."""
        self._sender, self._slots, self._take = sender, slots, take
        self._copies: SimpleQueue[tuple[int, int, Callable[[], None]]] = SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._send, name="hidden states", daemon=True).start()

    def send(self, step: int, hidden: Any) -> None:
        if self._closed.is_set():
            raise LinkClosed
        self._copies.put((step, len(hidden), self._take(hidden, self._slots.first_row(step))))

    def _send(self) -> None:
        """A device that fails ends the process, which the engine notices."""
        while not self._closed.is_set():
            step, num_rows, wait = self._copies.get()
            try:
                wait()
                self._sender.send(step, self._slots.of_step(step, num_rows))
            except LinkClosed:
                self._closed.set()
            except Exception:
                log.exception("hidden states of step %d are not handed on", step)
                die_like(1)


class StageLink:
    """One end of a socket between neighbours, and the slots that both map."""

    def __init__(self, end: socket.socket, slots: HiddenSlots) -> None:
        end.settimeout(LOOK_INTERVAL)
        self._end, self.slots = end, slots

    def send(self, step: int, hidden: Rows) -> None:
        slot = self.slots.of_step(step, len(hidden))
        if not np.shares_memory(slot, hidden):  # they are there
            slot[:] = hidden
        try:
            self._end.sendall(FRAME.pack(step, *hidden.shape))
        except OSError as error:
            raise LinkClosed from error

    def receive(self, step: int, num_rows: int, check: Callable[[], None] = lambda: None) -> Int32:
        frame = b""
        while len(frame) < FRAME.size:
            try:
                data = self._end.recv(FRAME.size - len(frame))
            except TimeoutError:
                check()
                continue
            except OSError as error:
                raise LinkClosed from error
            if not data:
                raise LinkClosed
            frame += data
        check_frame(FRAME.unpack(frame), (step, num_rows, self.slots.rows.shape[1]))
        return self.slots.indices(step, num_rows)


def check_frame(actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if actual != expected:
        raise EngineFailed(f"a stage has sent (step, rows, columns) {actual} instead of {expected}")


class TcpSender:
    """To a stage on another machine."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        self._end = end

    def send(self, step: int, hidden: Rows) -> None:
        payload = np.ascontiguousarray(hidden).data.cast("B")
        try:
            self._end.sendall(FRAME.pack(step, *hidden.shape), socket.MSG_MORE)
            self._end.sendall(payload)
        except OSError as error:
            raise LinkClosed from error


class TcpReceiver:
    """From a stage on another machine. A thread receives, so that the sender never waits for this stage."""

    def __init__(self, end: socket.socket, slots: HiddenSlots) -> None:
        end.settimeout(None)
        self._end, self._slots = end, slots
        self._arrived: SimpleQueue[tuple[int, ...] | None] = SimpleQueue()
        threading.Thread(target=self._receive, name="hidden states", daemon=True).start()

    def receive(self, step: int, num_rows: int, check: Callable[[], None] = lambda: None) -> Int32:
        while True:
            try:
                frame = self._arrived.get(timeout=LOOK_INTERVAL)
                break
            except Empty:
                check()
        if frame is None:
            self._arrived.put(None)
            raise LinkClosed
        check_frame(frame, (step, num_rows, self._slots.rows.shape[1]))
        return self._slots.indices(step, num_rows)

    def _receive(self) -> None:
        """Until the connection ends, or what comes is no step that there is room for."""
        header, step = bytearray(FRAME.size), 0
        while self._fill(memoryview(header)):
            frame = FRAME.unpack(header)
            if not self._slots.fits(frame) or frame[0] != step:
                break
            if not self._fill(self._slots.of_step(step, frame[1]).data.cast("B")):
                break
            self._arrived.put(frame)
            step += 1
        self._end.close()
        self._arrived.put(None)

    def _fill(self, view: memoryview) -> bool:
        offset = 0
        while offset < len(view):
            try:
                count = self._end.recv_into(view[offset:])
            except OSError:
                return False
            if not count:
                return False
            offset += count
        return True

"""The decode side of KV transfers: connections to prefill engines, and the prefills that these compute.

Each connection has a thread that connects and receives, and one that sends. When it breaks, its prefills end with the
blocks that have arrived whole. Host blocks that a prefill engine writes itself are given back only when it has closed
its end: from then on it cannot write."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from quire.core.plan import RemotePrefill, StepPlan
from quire.core.records import TransferStats
from quire.runtime.kv_files import BlockFormat
from quire.runtime.kv_transfer.news import NewsQueue
from quire.runtime.kv_transfer.wire import (
    VERSION,
    AskPrefill,
    BlockPayload,
    BlocksWritten,
    Buffers,
    CancelPrefill,
    Hello,
    NotWelcome,
    PeerAnswered,
    PeerError,
    PingPeer,
    PrefillEnded,
    ToProducer,
    Welcome,
    Wire,
    checksum,
    connect,
)

log = logging.getLogger("quire.engine")

STALL_SECONDS = 30.0  # without a message, while prefills are in flight; the longest step of an engine takes less
FIRST_RETRY, MAX_RETRY = 0.05, 1.0  # seconds between attempts to connect
WARN_SECONDS = 3.0  # of attempts in vain: both engines may be starting
MAX_NAME = 256  # characters of a tenant or a salt; of a longer one, a digest is sent
REFUSED_RETRY = 10.0  # after an engine has said that it computes something else


@dataclass(slots=True)
class BlocksArrived:
    """The first `num_blocks` of a prefill are whole."""

    prefill_id: int
    num_blocks: int


@dataclass(slots=True)
class PrefillDone:
    """No more of its blocks come, and its host blocks are not written any more."""

    prefill_id: int


@dataclass(slots=True)
class PrefillGivenUp:
    """The engine of a prefill does not answer. It may still write: PrefillDone comes later."""

    prefill_id: int


ConsumerNews = BlocksArrived | PrefillDone | PrefillGivenUp


@dataclass(slots=True)
class _Asked:
    prefill: RemotePrefill
    num_blocks: int = 0  # that have arrived
    given_up: bool = False


class KVConsumer:
    """Implements `PrefillEngines`."""

    def __init__(
        self,
        addresses: Sequence[str],
        format: BlockFormat,
        buffers: Callable[[int], Buffers],
        file: int | None = None,
        swaps_a_step: int = 4,
        num_host_blocks: int = 0,
    ) -> None:
        """`buffers`: the memory of a host block, or of a host slot, which are numbered behind them. `file`: all of
        these, where other processes can map them; `num_host_blocks`: in it."""
        self.swaps_a_step, self.num_host_blocks = swaps_a_step, num_host_blocks
        self.format, self.buffers, self.file, self.stall_seconds = format, buffers, file, STALL_SECONDS
        self.adapters: dict[str, str] = {}  # LoRA adapter -> a digest of it
        self.news: NewsQueue[ConsumerNews] = NewsQueue()
        self._asked: dict[int, _Producer] = {}  # by prefill
        self._producers = [_Producer(self, address) for address in addresses]
        for producer in self._producers:
            producer.start()

    @property
    def available(self) -> bool:
        return any(producer.is_connected for producer in self._producers)

    def begin(self, plan: StepPlan, wait: Callable[[], None]) -> None:
        """Ask for the prefills of a plan, each of the engine with the fewest tokens to compute."""
        for prefill in plan.prefills:
            for producer in sorted(self._producers, key=lambda each: each.num_tokens):
                if producer.ask(prefill, self.adapters):
                    self._asked[prefill.id] = producer
                    break
            else:
                self.news.put(PrefillDone(prefill.id))  # all have left since it was planned

    def cancel(self, prefill_id: int) -> None:
        if (producer := self._asked.get(prefill_id)) is not None:
            producer.cancel(prefill_id)

    def take(self) -> list[ConsumerNews]:
        news = list(self.news.take())
        for each in news:
            if isinstance(each, PrefillDone):
                self._asked.pop(each.prefill_id, None)
        return news

    def stats(self) -> TransferStats:
        num_bytes = sum(producer.num_bytes for producer in self._producers)
        num_peers = sum(producer.is_connected for producer in self._producers)
        return TransferStats(received_bytes=num_bytes, peers=num_peers)

    def stop(self) -> None:
        for producer in self._producers:
            producer.stop()


class _Producer:
    """A prefill engine: connected, or not."""

    def __init__(self, consumer: KVConsumer, address: str) -> None:
        self._consumer, self._address = consumer, address
        self.is_connected = False
        self.num_tokens = 0  # of prefills in flight
        self.num_bytes = 0  # bytes that have arrived, ever
        self._asked: dict[int, _Asked] = {}
        self._lock = threading.Lock()  # of all the above
        self._queue: SimpleQueue[tuple[Wire, ToProducer] | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._wire: Wire | None = None
        self._heard = 0.0
        self._warned = ""

    def start(self) -> None:
        for target, name in ((self._run, "kv-receive"), (self._send_all, "kv-send")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self._queue.put(None)
        if (wire := self._wire) is not None:
            wire.hang_up()

    # ---- asked by the engine's loop

    def ask(self, prefill: RemotePrefill, adapters: Mapping[str, str]) -> bool:
        tenant, salt, adapter = prefill.namespace
        with self._lock:
            wire = self._wire
            if not self.is_connected or wire is None:
                return False
            if not self._asked:
                self._heard = time.monotonic()
            self._asked[prefill.id] = _Asked(prefill)
            self.num_tokens += len(prefill.tokens)
        host_blocks = prefill.host_blocks if self._is_shared(wire) else []
        digest = adapters.get(adapter, adapter)
        names = _bounded(tenant), _bounded(salt)
        message = AskPrefill(prefill.id, prefill.tokens, *names, digest, prefill.first, host_blocks)
        self._queue.put((wire, message))  # a later connection must not hear of it
        return True

    def cancel(self, prefill_id: int) -> None:
        with self._lock:
            wire = self._wire if prefill_id in self._asked else None
        if wire is not None:
            self._queue.put((wire, CancelPrefill(prefill_id)))

    def _is_shared(self, wire: Wire) -> bool:
        return wire.is_local and self._consumer.file is not None

    # ---- connecting and receiving

    def _run(self) -> None:
        delay, lost = FIRST_RETRY, time.monotonic()
        while not self._stopping.is_set():
            try:
                self._wire = wire = Wire(connect(self._address), is_producer=False)
                if self._greet(wire):
                    delay = FIRST_RETRY
                    self._receive_all(wire)
                    lost = time.monotonic()
                else:
                    delay = REFUSED_RETRY
            except (OSError, PeerError) as error:
                if time.monotonic() > lost + WARN_SECONDS:
                    self._warn(f"the prefill engine at {self._address} cannot be reached: {error}")
            except Exception:
                log.exception("the connection to the prefill engine at %s failed", self._address)
            self._end_all()
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            self._stopping.wait(delay)
            delay = min(2 * delay, MAX_RETRY) if delay < REFUSED_RETRY else FIRST_RETRY

    def _greet(self, wire: Wire) -> bool:
        format, file = self._consumer.format, self._consumer.file if wire.is_local else None
        hello = Hello(
            VERSION,
            format.fingerprint,
            format.dtype,
            format.block_size,
            format.layout,
            format.nbytes,
            format.state_nbytes,
            is_shared=file is not None,
            num_host_blocks=self._consumer.num_host_blocks,
        )
        wire.send(hello, file=file)
        reply = wire.receive()
        if isinstance(reply, NotWelcome):
            self._warn(f"the prefill engine at {self._address} refuses this one: {reply.reason}")
            return False
        if not isinstance(reply, Welcome):
            raise PeerError(f"{type(reply).__name__} comes instead of a greeting")
        wire.greeted()
        log.info("connected to the prefill engine at %s", self._address)
        self._warned = ""
        with self._lock:
            self.is_connected, self._heard = True, time.monotonic()
        return True

    def _receive_all(self, wire: Wire) -> None:
        """Until the other end is closed. What breaks the rules ends the connection, and nothing more is taken."""
        error: PeerError | None = None
        while True:
            try:
                if (message := wire.receive()) is None:
                    break
                if error is None:
                    self._heard = time.monotonic()
                    self._take(message, wire)
            except PeerError as wrong:
                error = wrong
                log.warning("the prefill engine at %s: %s", self._address, wrong)
                self._give_up(wire)
                if not self._is_shared(wire):
                    break
            except OSError:
                break
        if not self._stopping.is_set():
            log.warning("the connection to the prefill engine at %s is lost", self._address)

    def _take(self, message: Any, wire: Wire) -> None:
        if isinstance(message, PeerAnswered):
            return
        if not isinstance(message, BlocksWritten | BlockPayload | PrefillEnded):
            raise PeerError(f"{type(message).__name__} comes after the greeting")
        asked = self._asked.get(message.id)
        if asked is None:
            raise PeerError(f"it speaks of prefill {message.id}, which is not in flight")
        if isinstance(message, PrefillEnded):
            if message.reason:
                log.info("a prefill ended early: %s", message.reason)
            self._end(message.id)
            return
        count = message.count if isinstance(message, BlocksWritten) else asked.num_blocks + 1
        if not asked.num_blocks < count <= len(asked.prefill.host_blocks):
            raise PeerError(f"it sends {count} blocks of {len(asked.prefill.host_blocks)}")
        if isinstance(message, BlockPayload):
            buffers = self._consumer.buffers(asked.prefill.host_blocks[asked.num_blocks])
            wire.receive_into(buffers)
            if checksum(buffers) != message.checksum:
                raise PeerError("a block has another checksum than it was sent with")
        elif not self._is_shared(wire):
            raise PeerError("it writes to memory that is not shared")
        format, has_all = self._consumer.format, count == len(asked.prefill.host_blocks)
        num_states = format.num_states if has_all else 0
        self.num_bytes += (count - asked.num_blocks - num_states) * format.nbytes + num_states * format.state_nbytes
        asked.num_blocks = count
        if not asked.given_up:
            self._consumer.news.put(BlocksArrived(message.id, count))

    def _end(self, prefill_id: int) -> None:
        with self._lock:
            ended = self._asked.pop(prefill_id)
            self.num_tokens -= len(ended.prefill.tokens)
        self._consumer.news.put(PrefillDone(prefill_id))

    def _end_all(self) -> None:
        with self._lock:
            self.is_connected = False
            left = list(self._asked)
        for prefill_id in left:
            self._end(prefill_id)

    # ---- sending

    def _send_all(self) -> None:
        while not self._stopping.is_set():
            try:
                task = self._queue.get(timeout=self._consumer.stall_seconds / 8)
                if task is not None:
                    task[0].send(task[1])
            except Empty:
                pass
            except OSError:
                if task is not None and task[0] is self._wire:
                    self._give_up(task[0])
            self._watch()

    def _watch(self) -> None:
        """Ask an engine that has work and is silent whether it is there, and give it up if it does not answer."""
        wire, silent = self._wire, time.monotonic() - self._heard
        if wire is None or not self._asked or not self.is_connected:
            return
        if silent > self._consumer.stall_seconds:
            log.error("the prefill engine at %s has not answered for %.0f s", self._address, silent)
            self._give_up(wire)
        elif silent > self._consumer.stall_seconds / 4:
            self._queue.put((wire, PingPeer()))

    def _give_up(self, wire: Wire) -> None:
        """Let the sequences go on, and the other end close the connection."""
        with self._lock:
            self.is_connected = False
            late = [asked for asked in self._asked.values() if not asked.given_up]
            for asked in late:
                asked.given_up = True
        for asked in late:
            self._consumer.news.put(PrefillGivenUp(asked.prefill.id))
        if self._is_shared(wire):
            wire.finish()
        else:
            wire.hang_up()

    def _warn(self, text: str) -> None:
        """Once, until it changes."""
        if text != self._warned and not self._stopping.is_set():
            self._warned = text
            log.warning("%s. Prompts are computed here", text)


def _bounded(name: str) -> str:
    """A salt is as long as its client likes."""
    return name if len(name) <= MAX_NAME else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

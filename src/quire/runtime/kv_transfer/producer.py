"""The prefill side of KV transfers: decode engines connect and ask for prompts, and get their blocks as these are full.

Threads receive and send; the engine's loop computes. A connection that breaks takes its prefills with it."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from socket import SHUT_RDWR, socket

from quire.core.errors import BadRequest
from quire.core.plan import BlockSend, StepPlan
from quire.core.records import TransferStats
from quire.core.transfer_config import NAME
from quire.runtime.kv_files import BlockFormat
from quire.runtime.kv_transfer.news import NewsQueue
from quire.runtime.kv_transfer.shared_blocks import SharedBlocks
from quire.runtime.kv_transfer.wire import (
    MAX_TEXT,
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
    ToConsumer,
    Welcome,
    Wire,
    checksum,
    listen,
)

log = logging.getLogger("quire.engine")

MAX_CONSUMERS = 64  # connections
MAX_PREFILLS = 4096  # in flight on one connection

Wait = Callable[[], None]  # returns when the swaps of a plan are done


@dataclass(slots=True)
class PrefillAsked:
    """A decode engine wants the KV of a prompt."""

    request_id: str
    message: AskPrefill


@dataclass(slots=True)
class PrefillDropped:
    """The decode engine does not want the KV of a prompt any more, or is gone."""

    request_id: str


@dataclass(slots=True)
class ConsumerLeft:
    """The connection to a decode engine is broken. All its prefills have been dropped."""

    consumer: "_Consumer"


@dataclass(slots=True)
class PeerPinged:
    consumer: "_Consumer"


@dataclass(slots=True)
class BlockSent:
    """A host block is not needed any more."""

    host_block: int


@dataclass(slots=True)
class _Prefill:
    consumer: "_Consumer"
    message: AskPrefill
    num_blocks: int
    num_queued: int = 0
    num_sent: int = 0


@dataclass(slots=True)
class _Sends:
    """Blocks that a plan swaps out."""

    wait: Wait
    blocks: list[tuple[_Prefill, BlockSend]] = field(default_factory=list)


ProducerNews = PrefillAsked | PrefillDropped | ConsumerLeft | PeerPinged | BlockSent


class KVProducer:
    """Implements `BlockSender`."""

    def __init__(self, address: str, format: BlockFormat, buffers: Callable[[int], Buffers]) -> None:
        """`buffers`: the memory of a host block."""
        self.format, self.buffers = format, buffers
        self.news: NewsQueue[ProducerNews] = NewsQueue()
        self.sent_bytes = 0
        self._prefills: dict[str, _Prefill] = {}  # by request, until their last block is queued
        self._consumers: dict[int, _Consumer] = {}
        try:
            self._listener = listen(address)
        except (OSError, OverflowError) as error:
            raise BadRequest(
                f"{NAME}: nothing can listen on {address}: {error}", "give another kv_port", param=NAME
            ) from None
        log.info("prompts are computed for decode engines that connect to %s", self._listener.getsockname())
        threading.Thread(target=self._accept_all, name="kv-accept", daemon=True).start()

    @property
    def port(self) -> int:
        """The TCP port at which the producer listens."""
        return int(self._listener.getsockname()[1])

    # ---- told by the engine's loop

    def add(self, asked: PrefillAsked) -> None:
        """The prefill will be computed, and its blocks sent."""
        message = asked.message
        num_blocks = num_wanted(message, self.format)
        if (consumer := self._consumers.get(_number(asked.request_id))) is not None:
            self._prefills[asked.request_id] = _Prefill(consumer, message, num_blocks)

    def begin(self, plan: StepPlan, wait: Wait) -> None:
        """Begin the sends of a plan. `wait` returns when its swaps are done."""
        by_consumer: dict[int, _Sends] = {}
        for send in plan.sends:
            if (prefill := self._prefills.get(send.request_id)) is None:
                self.news.put(BlockSent(send.host_block))
                continue
            by_consumer.setdefault(prefill.consumer.number, _Sends(wait)).blocks.append((prefill, send))
            prefill.num_queued += 1
            if prefill.num_queued == prefill.num_blocks:
                del self._prefills[send.request_id]
        for sends in by_consumer.values():
            sends.blocks[0][0].consumer.queue.put(sends)

    def refuse(self, asked: PrefillAsked, reason: str) -> None:
        if (consumer := self._consumers.get(_number(asked.request_id))) is not None:
            consumer.queue.put(PrefillEnded(asked.message.id, reason[:MAX_TEXT]))

    def end(self, request_id: str, reason: str) -> None:
        """No more of its blocks come. Those that are queued are sent before."""
        if (prefill := self._prefills.pop(request_id, None)) is not None:
            prefill.consumer.queue.put(PrefillEnded(prefill.message.id, reason[:MAX_TEXT]))

    def stats(self) -> TransferStats:
        return TransferStats(sent_bytes=self.sent_bytes, peers=len(self._consumers))

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for consumer in list(self._consumers.values()):
            consumer.queue.put(None)

    # ---- connections

    def _accept_all(self) -> None:
        number = 0
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed
            if len(self._consumers) >= MAX_CONSUMERS:
                log.warning("%d decode engines are connected: one more is refused", MAX_CONSUMERS)
                end.close()
                continue
            consumer = self._consumers[number] = _Consumer(self, number, end)
            consumer.start()
            number += 1

    def close(self, consumer: "_Consumer") -> None:
        """No more is put into its queue."""
        self._consumers.pop(consumer.number, None)
        self._prefills = {name: each for name, each in self._prefills.items() if each.consumer is not consumer}
        consumer.queue.put(None)


class _Consumer:
    """A decode engine that has connected: a thread that receives, and one that sends.

    The one that sends ends the connection. A decode engine uses the host blocks of a broken connection again as soon as
    it has ended: nothing is written there any more."""

    def __init__(self, producer: KVProducer, number: int, end: socket) -> None:
        self._producer, self.number = producer, number
        self.wire = Wire(end, is_producer=True)
        self.queue: SimpleQueue[_Sends | ToConsumer | None] = SimpleQueue()
        self._shared: SharedBlocks | None = None
        self._asked: set[int] = set()  # ids of prefills in flight
        self._broken = False
        self._sender = threading.Thread(target=self._send_all, name="kv-send", daemon=True)

    def start(self) -> None:
        threading.Thread(target=self._receive_all, name="kv-receive", daemon=True).start()

    # ---- receiving

    def _receive_all(self) -> None:
        greeted = False
        try:
            if greeted := self._greet():
                self._sender.start()
                while (message := self.wire.receive()) is not None:
                    self._take(message)
        except (OSError, PeerError) as error:
            log.warning("the connection to a decode engine ended: %s", error)
        except Exception:
            log.exception("the connection to a decode engine failed")
        self._broken = True
        for prefill_id in list(self._asked):
            self._producer.news.put(PrefillDropped(self._request_id(prefill_id)))
        if greeted:
            self._producer.news.put(ConsumerLeft(self))
            self._sender.join()
        else:
            self._producer.close(self)
        self.wire.close()

    def _greet(self) -> bool:
        hello, files = self.wire.receive_with_file()
        try:
            if not isinstance(hello, Hello):
                raise PeerError("the first message is no Hello")
            if difference := _difference(hello, self._producer.format):
                log.warning("a decode engine is refused: %s", difference)
                self.wire.send(NotWelcome(difference))
                return False
            if hello.is_shared:
                if not files:
                    raise PeerError("no file of shared memory came with the Hello")
                format = self._producer.format
                self._shared = SharedBlocks(files[0], format.nbytes, hello.num_host_blocks, format.state_nbytes)
        finally:
            for file in files:
                os.close(file)
        self.wire.send(Welcome())
        self.wire.greeted()
        return True

    def _take(self, message: object) -> None:
        news = self._producer.news
        if isinstance(message, AskPrefill):
            self._check(message)
            self._asked.add(message.id)
            news.put(PrefillAsked(self._request_id(message.id), message))
        elif isinstance(message, CancelPrefill):
            if message.id in self._asked:
                news.put(PrefillDropped(self._request_id(message.id)))
        elif isinstance(message, PingPeer):
            news.put(PeerPinged(self))
        else:
            raise PeerError(f"{type(message).__name__} comes after the greeting")

    def _check(self, asked: AskPrefill) -> None:
        """What the engine refuses by itself, such as tokens that it does not have, is not looked at here."""
        format = self._producer.format
        num_blocks, num_states = num_wanted(asked, format), format.num_states
        if asked.id in self._asked:
            raise PeerError(f"two prefills have the id {asked.id}")
        if len(self._asked) >= MAX_PREFILLS:
            raise PeerError(f"{MAX_PREFILLS} prefills are in flight, and one more is asked for")
        if asked.first < 0 or not asked.tokens or num_blocks <= 0:
            raise PeerError(f"a prefill of {len(asked.tokens)} tokens starts at block {asked.first}")
        if max(len(asked.tenant), len(asked.salt), len(asked.adapter)) > MAX_TEXT:
            raise PeerError(f"a name has more than {MAX_TEXT} characters")
        if self._shared is not None:
            blocks = asked.host_blocks
            if len(blocks) != num_blocks or not self._shared.holds(blocks, num_states):
                raise PeerError(f"a prefill of {num_blocks} blocks names {len(blocks)} host blocks wrongly")

    def _request_id(self, prefill_id: int) -> str:
        return f"prefill/{self.number}/{prefill_id}"

    # ---- sending

    def _send_all(self) -> None:
        """Until the engine's loop puts in no more. Where nothing can be sent, host blocks are given back."""
        while (task := self.queue.get()) is not None:
            try:
                if isinstance(task, _Sends):
                    self._send_blocks(task)
                elif isinstance(task, PrefillEnded):
                    self._end(task)
                else:
                    self.wire.send(task)
            except OSError:
                self._break()
            except Exception:
                log.exception("blocks could not be sent")
                self._break()
        self._broken = True
        self.wire.hang_up()

    def _break(self) -> None:
        """Let the thread that receives notice that nothing can be sent."""
        self._broken = True
        self.wire.hang_up()

    def _end(self, ended: PrefillEnded) -> None:
        self._asked.discard(ended.id)
        self.wire.send(ended)

    def _send_blocks(self, sends: _Sends) -> None:
        unsent = [send.host_block for _, send in sends.blocks]
        try:
            sends.wait()
            for prefill, send in sends.blocks:
                self._send(prefill, self._producer.buffers(send.host_block), send.index)
                self._producer.news.put(BlockSent(unsent.pop(0)))
            if self._shared is not None:
                for prefill in {prefill.message.id: prefill for prefill, _ in sends.blocks}.values():
                    self.wire.send(BlocksWritten(prefill.message.id, prefill.num_sent))
            for prefill, send in sends.blocks:
                if send.index + 1 == prefill.message.first + prefill.num_blocks:
                    self._end(PrefillEnded(prefill.message.id))
        finally:
            for host_block in unsent:
                self._producer.news.put(BlockSent(host_block))

    def _send(self, prefill: _Prefill, payload: Buffers, index: int) -> None:
        message = prefill.message
        if self._broken:
            raise ConnectionResetError("the decode engine is gone")
        assert index == message.first + prefill.num_sent, f"block {index} is sent out of order"
        if self._shared is not None:
            self._shared.write(message.host_blocks[prefill.num_sent], payload)
        else:
            self.wire.send(BlockPayload(message.id, checksum(payload)), payload)
        prefill.num_sent += 1
        self._producer.sent_bytes += sum(part.nbytes for part in payload)


def answer(pinged: PeerPinged) -> None:
    pinged.consumer.queue.put(PeerAnswered())


def num_wanted(asked: AskPrefill, format: BlockFormat) -> int:
    """Blocks that are sent for a prefill, and the state behind them."""
    return -(-len(asked.tokens) // format.block_size) - asked.first + format.num_states


def _number(request_id: str) -> int:
    return int(request_id.split("/")[1])


def _difference(hello: Hello, format: BlockFormat) -> str:
    """Why the blocks of a decode engine and of this one are not the same; "": they are."""
    if hello.version != VERSION:
        return f"it speaks version {hello.version}, and this engine {VERSION}"
    compared = (
        ("kv_cache_dtype", format.dtype, hello.dtype),
        ("block_size", format.block_size, hello.block_size),
        ("backend", format.layout, hello.layout),
        ("bytes of a block", format.nbytes, hello.block_bytes),
        ("bytes of a state", format.state_nbytes, hello.state_bytes),
    )
    for name, here, there in compared:
        if here != there:
            return f"its {name} is {there!r:.100}, and here it is {here!r}"
    if hello.fingerprint != format.fingerprint:
        return "its model, version, CPU, quantization or max_model_len differs, and so would the bits of its KV cache"
    return ""

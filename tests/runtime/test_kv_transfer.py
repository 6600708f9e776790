"""KV blocks over a socket: what is whole arrives, what is wrong ends the connection and nothing else."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.core.plan import BlockSend, RemotePrefill, StepPlan
from quire.runtime.kv_files import BlockFormat
from quire.runtime.kv_transfer import wire
from quire.runtime.kv_transfer.consumer import BlocksArrived, KVConsumer, PrefillDone, PrefillGivenUp
from quire.runtime.kv_transfer.producer import BlockSent, ConsumerLeft, KVProducer, PrefillAsked, PrefillDropped
from quire.runtime.kv_transfer.shared_blocks import SharedBlocks, new_shared_file
from trials import LENGTH

FORMAT = BlockFormat(fingerprint="a" * 32, dtype="float16", block_size=4, layout="native", nbytes=96)
TOKENS = list(range(10))  # two full blocks and two tokens
HELLO = wire.Hello(wire.VERSION, FORMAT.fingerprint, "float16", 4, "native", 96)
SECONDS = 5


def wait_for(met: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (value := met()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)
    return value


class Producer:
    """A producer whose engine's loop is the test."""

    def __init__(self, address: str) -> None:
        self.host = np.random.default_rng(0).integers(0, 256, (8, 96), np.uint8)
        self.kv = KVProducer(address, FORMAT, lambda block: [self.host[block, :60], self.host[block, 60:]])
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{self.kv.port}"
        self.seen: list[Any] = []

    def next(self, kind: type) -> Any:
        def found() -> Any:
            self.seen += self.kv.news.take()
            return next((news for news in self.seen if isinstance(news, kind)), None)

        news = wait_for(found)
        self.seen.remove(news)
        if isinstance(news, ConsumerLeft):
            self.kv.close(news.consumer)
        return news

    def send(self, asked: PrefillAsked, *blocks: int) -> None:
        """The first blocks of a prefill, from these host blocks."""
        plan = StepPlan(0, [])
        plan.sends = [BlockSend(host, asked.request_id, index) for index, host in enumerate(blocks)]
        self.kv.begin(plan, lambda: None)


class Consumer:
    def __init__(self, address: str) -> None:
        self.file = new_shared_file(8 * 96) if address.startswith("unix:") else None
        self.host = np.zeros((8, 96), np.uint8)
        if self.file is not None:
            self.host = SharedBlocks(self.file, 96, 8).blocks
        self.kv = KVConsumer(
            [address], FORMAT, lambda block: [self.host[block, :60], self.host[block, 60:]], self.file, 4, 8
        )
        wait_for(lambda: self.kv.available)
        self.news: list[Any] = []

    def ask(self, id: int = 0, blocks: tuple[int, ...] = (5, 2, 7)) -> None:
        plan = StepPlan(0, [])
        plan.prefills = [RemotePrefill(id, TOKENS, ("tenant", "salt", ""), 0, list(blocks))]
        self.kv.begin(plan, lambda: None)

    def until(self, kind: type) -> list[Any]:
        """All news up to one of this kind."""

        def arrived() -> bool:
            self.news += self.kv.take()
            return any(isinstance(news, kind) for news in self.news)

        wait_for(arrived)
        news, self.news = self.news, []
        return news


@pytest.fixture(params=["unix", "tcp"])
def producer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Producer]:
    made = Producer(f"unix:{tmp_path}/socket" if request.param == "unix" else "127.0.0.1:0")
    yield made
    made.kv.stop()


def test_blocks_arrive_as_they_were_sent(producer: Producer) -> None:
    consumer = Consumer(producer.address)
    consumer.ask()
    asked = producer.next(PrefillAsked)
    assert asked.message.tokens == TOKENS and asked.message.tenant == "tenant"
    producer.kv.add(asked)
    producer.send(asked, 1, 4)
    assert producer.next(BlockSent).host_block == 1 and producer.next(BlockSent).host_block == 4
    wait_for(lambda: consumer.kv.stats().received_bytes == 2 * 96)
    assert [news for news in consumer.until(BlocksArrived) if isinstance(news, PrefillDone)] == []
    plan = StepPlan(1, [], sends=[BlockSend(0, asked.request_id, 2)])
    producer.kv.begin(plan, lambda: None)
    assert consumer.until(PrefillDone)[-1] == PrefillDone(0)
    assert np.array_equal(consumer.host[[5, 2, 7]], producer.host[[1, 4, 0]])
    assert asked.request_id not in producer.kv._prefills and producer.kv.stats().sent_bytes == 3 * 96
    consumer.kv.stop()


def test_a_machine_that_is_gone_is_noticed_also_while_nothing_is_asked() -> None:
    """Else the next prompt would wait for it as long as for an engine that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    for end in ends:
        wire.Wire(end, is_producer=False)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + interval * count <= wire.GONE_SECONDS, "of an idle connection"
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 1000 * wire.GONE_SECONDS, "of a busy one"
        end.close()


def test_a_prefill_that_is_cancelled_or_refused_ends_on_both_sides(producer: Producer) -> None:
    consumer = Consumer(producer.address)
    consumer.ask(0)
    asked = producer.next(PrefillAsked)
    producer.kv.add(asked)
    consumer.kv.cancel(0)
    assert producer.next(PrefillDropped).request_id == asked.request_id
    producer.kv.end(asked.request_id, "it was cancelled")
    assert consumer.until(PrefillDone) == [PrefillDone(0)]
    consumer.ask(1)
    producer.kv.refuse(producer.next(PrefillAsked), "no")
    assert consumer.until(PrefillDone) == [PrefillDone(1)]
    consumer.kv.cancel(1)  # it has ended
    consumer.kv.stop()
    producer.next(ConsumerLeft)


def test_what_has_arrived_counts_when_the_other_side_dies(producer: Producer) -> None:
    consumer = Consumer(producer.address)
    consumer.ask()
    asked = producer.next(PrefillAsked)
    producer.kv.add(asked)
    producer.send(asked, 3)
    wait_for(lambda: consumer.kv.stats().received_bytes == 96)
    producer.kv.stop()
    news = consumer.until(PrefillDone)
    assert news == [BlocksArrived(0, 1), PrefillDone(0)] and np.array_equal(consumer.host[5], producer.host[3])
    assert not consumer.kv.available
    consumer.ask(1)
    assert consumer.until(PrefillDone) == [PrefillDone(1)], "a prefill that nothing computes never ends"
    consumer.kv.stop()


def test_a_decode_engine_that_dies_gives_host_blocks_back(producer: Producer) -> None:
    consumer = Consumer(producer.address)
    consumer.ask()
    asked = producer.next(PrefillAsked)
    producer.kv.add(asked)
    consumer.kv.stop()
    producer.next(PrefillDropped)
    producer.send(asked, 3, 1)
    assert {producer.next(BlockSent).host_block, producer.next(BlockSent).host_block} == {3, 1}
    producer.next(ConsumerLeft)
    producer.send(asked, 5)
    assert producer.next(BlockSent).host_block == 5


def frame(message: Any) -> bytes:
    text = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(text)) + text


def ask_prefill(**changes: Any) -> wire.AskPrefill:
    given = {"id": 1, "tokens": TOKENS, "tenant": "", "salt": "", "adapter": "", "first": 0, "host_blocks": []}
    return wire.AskPrefill(**{**given, **changes})


WRONG = {
    "no Hello": frame(ask_prefill()),
    "no message": struct.pack("<I", 5) + b"\xc1abcd",
    "a message of 4 GiB": struct.pack("<I", 2**32 - 1),
    "two Hellos": frame(HELLO) * 2,
    "a message of the other side": frame(HELLO) + frame(wire.PrefillEnded(1)),
    "a prefill of nothing": frame(HELLO) + frame(ask_prefill(tokens=[])),
    "a prefill behind its end": frame(HELLO) + frame(ask_prefill(first=3)),
    "a prefill before its start": frame(HELLO) + frame(ask_prefill(first=-1)),
    "two prefills of one id": frame(HELLO) + frame(ask_prefill()) * 2,
    "a long name": frame(HELLO) + frame(ask_prefill(salt="x" * 5000)),
    "shared memory without a file": frame(msgspec.structs.replace(HELLO, is_shared=True)),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_decode_engine_that_breaks_the_rules_is_disconnected(producer: Producer, text: bytes) -> None:
    with wire.connect(producer.address) as end:
        end.sendall(text)
        if text.startswith(frame(HELLO)):
            producer.next(ConsumerLeft)
        end.settimeout(SECONDS)
        while end.recv(4096):
            pass
    producer.seen.clear()
    consumer = Consumer(producer.address)
    consumer.ask()
    assert producer.next(PrefillAsked)
    consumer.kv.stop()


def test_host_blocks_beyond_the_shared_memory_are_refused(tmp_path: Path) -> None:
    producer = Producer(f"unix:{tmp_path}/socket")
    for blocks in ((0, 1, 8), (0, 1, -1), (0, 1)):
        consumer = Consumer(producer.address)
        consumer.ask(blocks=blocks)
        producer.next(ConsumerLeft)
        assert PrefillDone(0) in consumer.until(PrefillDone)
        consumer.kv.stop()
        assert not any(isinstance(news, PrefillAsked) for news in (*producer.seen, *producer.kv.news.take()))
    producer.kv.stop()


def test_memory_that_can_be_cut_is_not_mapped() -> None:
    unsealed, odd = os.memfd_create("a", os.MFD_ALLOW_SEALING), new_shared_file(100)
    os.truncate(unsealed, 96)
    for file in (unsealed, odd):
        with pytest.raises(wire.PeerError):
            SharedBlocks(file, 96, 1)
        os.close(file)


@pytest.mark.trial
def test_damaged_messages_end_the_connection_and_nothing_else(producer: Producer) -> None:
    rng, good = random.Random(7), frame(HELLO) + b"".join(frame(ask_prefill(id=i)) for i in range(3))
    for _ in range(60 * LENGTH):
        text = bytearray(good[: rng.randint(1, len(good))])
        for _ in range(rng.randint(0, 3)):
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        # It may be closed by then, or too many are waiting to be accepted.
        with contextlib.suppress(OSError), wire.connect(producer.address) as end:
            end.sendall(text)
            end.shutdown(socket.SHUT_WR)
        for news in producer.kv.news.take():
            if isinstance(news, ConsumerLeft):
                producer.kv.close(news.consumer)
    consumer = Consumer(producer.address)
    consumer.kv.stop()


class Impostor:
    """Welcomes one decode engine, and then says what the test says."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}/impostor"
        self._listener = wire.listen(self.address)

    def accept(self) -> socket.socket:
        end, _ = self._listener.accept()
        _, files, _, _ = socket.recv_fds(end, 4096, 1)
        for file in files:
            os.close(file)
        end.sendall(frame(wire.Welcome()))
        self._listener.close()
        return end


@pytest.mark.parametrize(
    "message",
    [
        wire.BlocksWritten(0, 4),
        wire.BlocksWritten(0, 0),
        wire.BlocksWritten(9, 1),
        wire.PrefillEnded(9),
        wire.Welcome(),
        wire.AskPrefill(1, [], "", "", "", 0, []),
    ],
    ids=["too many blocks", "no block", "blocks of another", "the end of another", "a greeting", "the other side's"],
)
def test_a_prefill_engine_that_breaks_the_rules_is_given_up(tmp_path: Path, message: Any) -> None:
    impostor = Impostor(tmp_path)
    ends: list[socket.socket] = []
    thread = threading.Thread(target=lambda: ends.append(impostor.accept()))
    thread.start()
    consumer = Consumer(impostor.address)
    thread.join()
    [end] = ends
    consumer.ask()
    end.recv(4096)
    end.sendall(frame(message))
    assert consumer.until(PrefillGivenUp) == [PrefillGivenUp(0)]
    time.sleep(0.05)
    assert consumer.kv.take() == [], "the impostor may still write to the host blocks"
    end.close()
    assert consumer.until(PrefillDone) == [PrefillDone(0)]
    consumer.kv.stop()

"""Both ends of a channel in one process, where every step of it can be seen."""

import random
import socket
from collections.abc import Iterator

import pytest

from quire.ipc.channel import HEADER, Channel


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """One that bytes are written to and read from by hand, and the channel on the other side."""
    plain, other = socket.socketpair()
    with plain:
        channel = Channel(other)
        yield plain, channel
        channel.close()


def framed(message: bytes) -> bytes:
    return HEADER.pack(len(message)) + message


def test_messages_come_whole_however_their_bytes_come(ends: tuple[socket.socket, Channel]) -> None:
    plain, channel = ends
    messages = [b"", b"a", b"bc" * 100, random.Random(0).randbytes(5000)]
    stream, chance, found = b"".join(map(framed, messages)), random.Random(1), list[bytes]()
    while stream:
        size = chance.choice([1, 3, 4, 5, 700])
        plain.sendall(stream[:size])
        stream = stream[size:]
        found += channel.receive()
    assert found == messages
    assert channel.receive() == []  # nothing is there, and nobody waits
    assert not channel.ended


def test_what_the_other_end_does_not_read_is_kept() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    messages = [random.Random(number).randbytes(300_000) for number in range(20)]
    for message in messages:
        ours.send(message)
    assert ours.has_unsent
    found = list[bytes]()
    while len(found) < len(messages):
        found += theirs.receive()
        ours.flush()
    assert found == messages
    assert not ours.has_unsent
    ours.close()
    theirs.close()


def test_last_words_are_heard(ends: tuple[socket.socket, Channel]) -> None:
    plain, channel = ends
    plain.sendall(framed(b"farewell") + framed(b"cut off")[:-1])
    plain.close()
    assert channel.receive() == [b"farewell"]
    assert channel.receive() == []
    assert channel.ended


def test_whoever_has_finished_still_listens(ends: tuple[socket.socket, Channel]) -> None:
    plain, channel = ends
    channel.finish()
    assert plain.recv(1) == b""
    plain.sendall(framed(b"one more thing"))
    assert channel.receive() == [b"one more thing"]


def test_sending_to_one_that_is_gone_is_no_error(ends: tuple[socket.socket, Channel]) -> None:
    plain, channel = ends
    plain.close()
    channel.send(b"x" * 1_000_000)
    channel.send(b"y")
    assert not channel.has_unsent
    assert channel.receive() == []
    assert channel.ended

"""Connections between machines: only who knows the token is let in."""

import asyncio
import socket

import pytest

from quire.ipc import tcp
from quire.ipc.tcp import TokenListener, connect


def test_strangers_are_refused_and_the_one_with_the_token_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "TOKEN_TIMEOUT", 0.1)

    async def main() -> None:
        with TokenListener("127.0.0.1") as listener:
            accepting = asyncio.create_task(listener.accept())
            silent = socket.create_connection((listener.host, listener.port))
            wrong = connect(listener.host, listener.port, bytes(len(listener.token)), 1.0)
            short = connect(listener.host, listener.port, listener.token[:5], 1.0)
            short.shutdown(socket.SHUT_WR)
            ours = connect(listener.host, listener.port, listener.token, 1.0)
            theirs = await accepting
            ours.sendall(b"a message")
            assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"a message"
            assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for stranger in (silent, wrong, short):
                stranger.settimeout(1.0)
                assert stranger.recv(1) == b""
                stranger.close()
            ours.close()
            theirs.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_two_listeners_have_tokens_of_their_own() -> None:
    with TokenListener("127.0.0.1") as one, TokenListener("127.0.0.1") as other:
        assert one.token != other.token and one.port != other.port

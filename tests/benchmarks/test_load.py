"""The load generator against a server that streams what the test says."""

import asyncio
from typing import Any

import pytest
from benchmarks.load import Ask, Load, LoadFailed, run_load

from streaming_server import Respond, begin, break_off, fail_midway, refuse, send, serving, stream_all, text, usage


def test_every_request_is_answered_and_counted() -> None:
    asks = [Ask(list(range(number + 1)), 4) for number in range(10)]
    with serving(stream_all) as url:
        load = run_load(url, asks, users=3)
    assert sorted(answer.num_prompt for answer in load.answers) == list(range(1, 11))
    assert all(answer.num_output == len(answer.came) == 4 for answer in load.answers)
    assert load.pieces_per_token == 1
    assert load.rate == pytest.approx(40 / load.seconds)


def test_users_wait_for_their_answers() -> None:
    """Eight requests of three users: never more than three at once, and three at some moment."""
    under_way, most = 0, 0
    all_here = asyncio.Event()

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if most == 3:
            all_here.set()
        await all_here.wait()
        await stream_all(body, writer)
        under_way -= 1

    with serving(respond) as url:
        run_load(url, [Ask([1], 1)] * 8, users=3)
    assert most == 3


def test_times_are_those_of_the_pieces() -> None:
    """The first piece comes at once, the second a while later; an event split in two counts when its end comes."""
    pause = 0.05

    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begin(writer)
        send(writer, text("a") + text("b")[:10])
        await writer.drain()
        await asyncio.sleep(pause)
        send(writer, text("b")[10:] + usage(1, 2))
        send(writer, b"")

    with serving(respond) as url:
        load = run_load(url, [Ask([1], 2)], users=1)
    [answer] = load.answers
    assert len(answer.came) == 2
    assert pause / 2 < load.gap(50) < load.seconds
    assert load.ttft(99) + load.gap(99) <= load.seconds


def test_a_body_without_chunks_ends_with_the_connection() -> None:
    async def respond(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begin(writer, chunked=False)
        writer.write(text("a") + usage(1, 1))

    with serving(respond) as url:
        assert run_load(url, [Ask([1], 1)], users=1).answers[0].num_output == 1


@pytest.mark.parametrize(
    ("respond", "words"),
    [(refuse, "status 400.*too long"), (break_off, "broke off"), (fail_midway, "out of memory")],
)
def test_failures_say_what_the_server_said(respond: Respond, words: str) -> None:
    with serving(respond) as url, pytest.raises(LoadFailed, match=words):
        run_load(url, [Ask([1], 4)] * 2, users=2)


def test_no_server() -> None:
    with pytest.raises(LoadFailed, match=r"no server at http://127\.0\.0\.1:9"):
        run_load("http://127.0.0.1:9", [Ask([1], 1)], users=1)


def test_a_load_without_answers_has_no_rate() -> None:
    assert Load([], 1.0).rate == 0

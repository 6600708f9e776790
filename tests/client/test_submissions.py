"""Which request is charged with a crash, and in which order requests go to the next engine."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from typing import Any

import pytest

from quire.client import submissions
from quire.client.submissions import Submissions
from quire.engine.messages import Cancel, ToEngine


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return wraps(test)(lambda: asyncio.run(test()))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "SECONDS_ALONE", 0.05)


class Waiting:
    """A request in flight, and nothing more."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.crashes: Counter[int] = Counter()
        self.num_kills = 0
        self.finished = False

    def submission(self) -> list[ToEngine]:
        return [Cancel(self.id, None)]

    def crashed(self, sample: int) -> None:
        self.crashes[sample] += 1

    def gain(self, sample: int = 0) -> None:
        del self.crashes[sample]
        self.num_kills = 0


class Supervised:
    """Requests a, b, c, ... and the engines they are given to."""

    def __init__(self, names: str) -> None:
        self.requests = {name: Waiting(name) for name in names}
        self.sent = ""
        self.num_opened = 0
        self.submissions = Submissions(self.requests, self._open)  # type: ignore[arg-type]
        self.submissions.engine_ready(self._send)

    def _send(self, message: ToEngine) -> None:
        assert isinstance(message, Cancel)
        self.sent += message.request_id

    def _open(self) -> None:
        self.num_opened += 1

    def crash(self, active: str | Iterable[tuple[str, int]], killed: bool = False) -> str | None:
        """The engine dies and another one starts. -> who is charged with it"""
        self.submissions.close()
        culprit = self.submissions.engine_died([(each[0], int((*each, 0)[1])) for each in active], killed)
        self.sent = ""
        if culprit is not None:
            self.end(culprit.id)
        self.submissions.engine_ready(self._send)
        return culprit.id if culprit else None

    def gain(self, names: str) -> None:
        for name in names:
            self.requests[name].gain()
            self.submissions.update()

    def end(self, name: str) -> None:
        request = self.requests.pop(name)
        request.finished = True
        self.submissions.ended(request)  # type: ignore[arg-type]


@in_loop
async def test_who_gains_nothing_from_crash_to_crash_is_charged() -> None:
    engine = Supervised("abcd")
    assert engine.sent == "abcd"
    assert engine.crash("abc") is None and engine.sent == "abcd"
    engine.gain("ab")
    assert engine.crash("abc") is None and engine.sent == "c"  # alone: the others wait
    assert engine.crash("c") == "c" and engine.sent == "abd"
    assert engine.num_opened == 3  # the first engine, the second and the last


@in_loop
async def test_suspects_run_one_at_a_time_and_the_others_wait() -> None:
    engine = Supervised("abcde")
    engine.crash("bcd")
    engine.crash("bcd")
    assert engine.sent == "b" and not engine.submissions.open
    new = engine.requests["f"] = Waiting("f")
    engine.submissions.add(new)  # type: ignore[arg-type]
    assert engine.sent == "b"
    engine.gain("b")
    assert engine.sent == "bc"
    assert engine.crash("bc") == "c"  # b has gained something since: it is not its fault
    assert engine.sent == "d"
    engine.end("d")  # its client has left
    assert engine.sent == "dabef" and engine.submissions.open


@in_loop
async def test_kills_are_never_charged() -> None:
    engine = Supervised("ab")
    for _ in range(20):
        assert engine.crash("a", killed=True) is None
        assert engine.crash("", killed=True) is None
    assert engine.sent == "a" and not engine.requests["a"].crashes and not engine.requests["b"].num_kills
    assert engine.crash("a") is None
    assert engine.crash("a") is None
    assert engine.crash("a") == "a"


@in_loop
async def test_crashes_between_steps_are_charged_too_but_not_those_of_engines_that_start() -> None:
    engine = Supervised("abc")
    assert engine.crash("") is None
    assert engine.crash("") is None and engine.sent == "a"
    engine.gain("a")
    assert engine.sent == "ab"
    assert engine.crash("") == "b"
    assert engine.crash("") == "c"
    engine.submissions.close()
    for _ in range(9):  # engines that never became ready
        assert engine.submissions.engine_died([], killed=False) is None


@in_loop
async def test_a_sample_that_gains_nothing_is_not_hidden_by_another() -> None:
    engine = Supervised("ab")
    for _ in range(2):
        assert engine.crash([("a", 0), ("a", 1)]) is None
        engine.requests["a"].gain(0)  # and sample 1 does not
    assert engine.crash([("a", 0), ("a", 1)]) == "a"


@in_loop
async def test_a_suspect_that_takes_long_is_not_waited_for() -> None:
    engine = Supervised("ab")
    engine.crash("a")
    engine.crash("a")
    assert engine.sent == "a"
    while not engine.submissions.open:
        await asyncio.sleep(0.001)
    assert engine.sent == "ab"
    assert engine.crash("ab") == "a"


@in_loop
async def test_nothing_is_sent_after_an_engine_has_ended() -> None:
    engine = Supervised("ab")
    engine.crash("a")
    engine.crash("a")
    engine.submissions.close()
    await asyncio.sleep(3 * submissions.SECONDS_ALONE)
    assert engine.sent == "a"


@in_loop
async def test_after_kills_suspects_run_some_at_a_time_and_then_one_at_a_time() -> None:
    names = "abcdefghijklmnop"
    engine = Supervised(names)
    engine.crash(names, killed=True)
    assert engine.sent == names
    engine.crash(names, killed=True)
    assert engine.sent == "abcd"
    engine.gain("b")
    assert engine.sent == "abcde"
    engine.crash("acde", killed=True)
    assert engine.sent == "a"  # of fifteen
    engine.gain("acdefghijklmnop")
    assert engine.sent == "acdefghijklmnopb" and engine.submissions.open

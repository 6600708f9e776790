"""Hedging: a second worker is asked where the first is slow, the first answer wins, and all is charged once."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.gateways import (
    SECONDS,
    SSE_HEAD,
    Asked,
    RunningGateway,
    Script,
    Upstream,
    answers,
    chunk,
    completion,
    event,
    gateway,
    response,
    streams,
    upstreams,
    wait_for,
)
from quire.gateway.config import GatewayConfig
from quire.gateway.hedge_credit import MAX_CREDIT, HedgeCredit

CONFIG = """
policy = "session"
audit_log = "{folder}/audit.jsonl"
[models.m]
price = {{prompt = 1000.0, output = 1000.0}}
[[keys]]
name = "k"
key = "secret"
monthly_budget = 100.0
[faults]
breaker_failures = 100
hedge_seconds = 0.05
hedge_ratio = 1.0
[[workers]]
url = "{first}"
name = "first"
[[workers]]
url = "{second}"
name = "second"
"""


@dataclass
class Slow:
    """Sends a head if there is one, and nothing more until it may; `closed` is set when its client goes first."""

    then: Script
    head: bytes = b""
    go: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def __call__(self, connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(self.head)
        connection.settimeout(0.01)
        while not self.go.is_set():
            with suppress(TimeoutError):
                try:
                    gone = not connection.recv(1)
                except ConnectionResetError:
                    gone = True
                if gone:
                    self.closed.set()
                    return False
        connection.settimeout(None)
        return self.then(connection, asked)


@dataclass
class Pair:
    running: RunningGateway
    first: Upstream
    second: Upstream
    folder: Path
    headers: dict[str, str] = field(default_factory=dict)  # of a session that goes to the first
    before: dict[str, float] = field(default_factory=dict)  # metrics

    def begin(self, first: Script, second: Script) -> None:
        self.wait_until_idle()
        self.first.script, self.second.script = first, second
        self.first.asked.clear()
        self.second.asked.clear()
        (self.folder / "audit.jsonl").write_text("")
        self.before = {line.rpartition(" ")[0]: float(line.split()[-1]) for line in self._metrics()}

    def chat(self, **body: object) -> str:
        answer = self.running.chat(headers=self.headers, **body)
        return answer.text if answer.status_code == 200 else f"{answer.status_code} {answer.text}"

    def counted(self, name: str, *labels: str) -> float:
        """What a metric has grown by."""
        fitting = [line for line in self._metrics() if line.startswith(f"quire_gateway_{name}{{")]
        fitting = [line for line in fitting if all(label in line for label in labels)]
        return sum(float(line.split()[-1]) - self.before.get(line.rpartition(" ")[0], 0.0) for line in fitting)

    def _metrics(self) -> list[str]:
        lines = self.running.http.get(f"{self.running.admin}/metrics").text.splitlines()
        return [line for line in lines if not line.startswith("#")]

    def audit(self, decision: str) -> list[object]:
        """Which workers it was about."""
        lines = [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]
        return [line["worker"] for line in lines if line["decision"] == decision]

    def wait_until_idle(self) -> None:
        workers = self.running.workers
        wait_for(lambda: not any(each["in_flight"] or each["tokens_in_flight"] for each in workers().values()))
        assert self.running.metric("tenant_requests_in_flight") == self.running.metric("requests_in_flight") == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("hedging")
    with (
        upstreams(answers("first"), answers("second")) as [first, second],
        gateway(CONFIG.format(folder=folder, first=first.url, second=second.url), folder=folder) as running,
    ):
        made = Pair(running, first, second, folder)
        for number in range(100):
            made.headers = {"authorization": "Bearer secret", "x-session-id": str(number)}
            if "first" in made.chat():
                break
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_the_second_answers_first_and_the_first_is_cancelled_at_once(pair: Pair, stream: bool) -> None:
    """Also where the first has sent the head of a stream: servers do that before they compute anything."""
    slow = Slow(answers("A"), SSE_HEAD if stream else b"")
    pair.begin(slow, streams("B") if stream else answers("B", prompt=5, output=2))
    answer = pair.chat(stream=stream)
    assert "B" in answer and "A" not in answer
    assert slow.closed.wait(SECONDS)
    assert len(pair.first.asked) == len(pair.second.asked) == 1
    pair.wait_until_idle()
    assert pair.counted("hedges_total", 'outcome="won"') == pair.counted("hedges_total") == 1
    assert pair.counted("decisions_total", 'worker="second"') == pair.counted("decisions_total") == 1
    assert pair.counted("requests_total") == 1
    tokens = 8 if stream else 7
    assert pair.counted("tokens_total") == tokens, "of the answer that was sent, once"
    assert pair.counted("budget_left") == pytest.approx(-tokens * 0.001)
    assert pair.counted("worker_failures_total") == 0, "slow is not broken"
    assert pair.audit("hedged") == pair.audit("served") == ["second"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_answers_first_and_the_second_is_cancelled_at_once(pair: Pair, stream: bool) -> None:
    second = Slow(answers("B"))

    def late(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(SSE_HEAD if stream else b"")
        wait_for(lambda: pair.second.asked)
        connection.sendall(chunk(event("A")) + b"0\r\n\r\n" if stream else response(completion(text="A")))
        return True

    pair.begin(late, second)
    assert "A" in pair.chat(stream=stream)
    assert second.closed.wait(SECONDS)
    pair.wait_until_idle()
    assert pair.counted("hedges_total", 'outcome="lost"') == pair.counted("hedges_total") == 1
    assert pair.audit("hedged") == ["second"] and pair.audit("served") == ["first"]


def test_it_is_off_unless_the_configuration_says_so(tmp_path: Path) -> None:
    with upstreams(answers("A"), answers("A")) as made:
        flags = [word for each in made for word in ("--worker", each.url)]
        with gateway("", *flags, folder=tmp_path) as running:
            for upstream in made:
                upstream.script = Slow(answers("A"))
                threading.Timer(0.3, upstream.script.go.set).start()
            assert "A" in running.chat().text
            assert sum(len(upstream.asked) for upstream in made) == 1
    assert GatewayConfig().faults.hedge_seconds is None


def test_a_comment_that_keeps_a_connection_alive_is_no_answer(pair: Pair) -> None:
    slow = Slow(answers("A"), SSE_HEAD + chunk(b": wait\n\n"))
    pair.begin(slow, streams("B"))
    assert pair.chat(stream=True).startswith(event("B").decode())
    assert slow.closed.wait(SECONDS)


def test_nothing_is_hedged_behind_the_first_byte(pair: Pair) -> None:
    def late(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(chunk(event("b")) + b"0\r\n\r\n")
        return True

    slow = Slow(late, SSE_HEAD + chunk(event("a")))
    pair.begin(slow, streams("other"))
    threading.Timer(0.3, slow.go.set).start()
    assert pair.chat(stream=True) == (event("a") + event("b")).decode()
    assert not pair.second.asked


@pytest.mark.parametrize("status", [429, 502, 503])
def test_where_one_fails_the_other_goes_on(pair: Pair, status: int) -> None:
    def fails(connection: socket.socket, asked: Asked) -> bool:
        wait_for(lambda: pair.first.asked and pair.second.asked)
        connection.sendall(response(b"{}", status=status))
        return True

    for good, scripts in (("second", (fails, Slow(answers("A")))), ("first", (Slow(answers("A")), fails))):
        pair.begin(*scripts)
        [slow] = [script for script in scripts if isinstance(script, Slow)]
        threading.Timer(0.2, slow.go.set).start()
        assert "A" in pair.chat()
        pair.wait_until_idle()
        outcome = "won" if good == "second" else "lost"
        assert pair.counted("hedges_total", f'outcome="{outcome}"') == pair.counted("hedges_total") == 1
        assert pair.audit("served") == [good] and len(pair.audit("attempt_failed")) == 1
        assert pair.counted("worker_failures_total") == (status != 429)


def test_where_both_die_the_error_is_clear(pair: Pair) -> None:
    def dies(connection: socket.socket, asked: Asked) -> bool:
        wait_for(lambda: pair.first.asked and pair.second.asked)
        return False

    pair.begin(dies, dies)
    assert pair.chat().startswith("502")
    pair.wait_until_idle()


def test_a_client_that_leaves_cancels_both(pair: Pair) -> None:
    first, second = Slow(answers("A")), Slow(answers("B"))
    pair.begin(first, second)
    with socket.create_connection(("127.0.0.1", pair.running.port)) as client:
        body = b'{"model": "m", "messages": []}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: pair.first.asked and pair.second.asked)
    assert first.closed.wait(SECONDS) and second.closed.wait(SECONDS)
    pair.wait_until_idle()


def test_stored_responses_are_made_once(pair: Pair) -> None:
    slow = Slow(answers("A"))
    pair.begin(slow, answers("B"))
    threading.Timer(0.2, slow.go.set).start()
    url = f"{pair.running.url}/v1/responses"
    assert "A" in pair.running.http.post(url, json={"model": "m", "input": "x"}, headers=pair.headers).text
    assert not pair.second.asked


def test_a_share_of_requests_may_be_hedged() -> None:
    credit = HedgeCredit()
    num_hedged = 0
    for _ in range(1000):
        credit.earn(0.1)
        num_hedged += credit.spend()
    assert 100 <= num_hedged <= 101
    for _ in range(1000):
        credit.earn(1.0)
    assert sum(credit.spend() for _ in range(1000)) == MAX_CREDIT, "a quiet hour is no reason for a burst"

"""Workers on a network that delays, loses and partitions: streams go on elsewhere, and nothing hangs or is lost."""

import concurrent.futures
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.gateways import Asked, RunningGateway, Script, Upstream, chunk, gateway, wait_for
from gateway.namespaces import Host, hosts, needs_netem
from gateway.test_resuming import HEAD, WORDS, goes_on, texts, told
from trials import LENGTH

pytestmark = pytest.mark.trial
CONFIG = "[faults]\nhealth_interval = 0.1\nconnect_timeout = 0.5\nbreaker_seconds = 0.2\n"


def slowly(begun: threading.Event) -> Script:
    """As `goes_on`, word by word."""

    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(HEAD)
        for number in range(len(asked.json["resume"]["events"]), len(WORDS)):  # type: ignore[index]
            connection.sendall(told(number))
            begun.set()
            time.sleep(0.05)
        connection.sendall(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    return script


@pytest.fixture
def network() -> Iterator[list[tuple[Host, Upstream]]]:
    with hosts(2) as made:
        workers = [(host, Upstream(goes_on, resumes=True, listener=host.listen())) for host in made]
        yield workers
        for _, upstream in workers:
            upstream.close()


def table(upstream: Upstream, name: str) -> str:
    return f'[[workers]]\nurl = "{upstream.url}"\nname = "{name}"\n'


def ready(running: RunningGateway) -> int:
    """Workers that take requests. Streams that a partition ends are failures, and five in a row open a breaker."""
    return sum(worker["state"] == "ready" and worker["breaker"] != "open" for worker in running.workers().values())


@pytest.mark.timeout(600)
def test_streams_leave_a_worker_behind_a_partition(network: list[tuple[Host, Upstream]], tmp_path: Path) -> None:
    """No packet says that it is gone. Health checks do, and streams go on at the other one."""
    (near, first), (_, second) = network
    with gateway(CONFIG + table(first, "a") + table(second, "b"), folder=tmp_path) as running:
        for _ in range(LENGTH):
            wait_for(lambda: ready(running) == 2)
            running.http.post(f"{running.admin}/workers/b/drain")
            begun = threading.Event()
            first.script = slowly(begun)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answer = pool.submit(running.chat, stream=True)
                assert begun.wait(20)
                began = time.monotonic()
                near.partition()
                running.http.post(f"{running.admin}/workers/b/resume")
                assert texts(answer.result().text) == WORDS
                assert time.monotonic() - began < 3
            assert texts(running.chat(stream=True).text) == WORDS, "the other one takes what comes meanwhile"
            near.heal()
        wait_for(lambda: ready(running) == 2)
        assert all(not worker["in_flight"] for worker in running.workers().values())


@pytest.mark.timeout(600)
def test_delay_and_loss_lose_nothing(network: list[tuple[Host, Upstream]], tmp_path: Path) -> None:
    needs_netem(network[0][0])
    for host, _ in network:
        host.worsen("delay", "20ms", "10ms", "loss", "5%")
    tables = "".join(table(upstream, f"w{number}") for number, (_, upstream) in enumerate(network))
    with gateway("[faults]\nhealth_interval = 0.5\n" + tables, folder=tmp_path) as running:
        wait_for(lambda: ready(running) == 2)
        for _ in range(20 * LENGTH):
            assert texts(running.chat(stream=True).text) == WORDS

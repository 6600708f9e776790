"""Workers that are found in a Ray cluster, where Ray is installed."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.gateways import RunningGateway, answers, gateway, upstreams, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("ray") is None, reason="it needs Ray: pip install 'quire[ray]'"),
]

SECONDS = 90  # Ray takes some to start, and to notice


@contextmanager
def cluster() -> Iterator[str]:
    """Ray's own head node. -> its address"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    flags += ["--min-worker-port=0", "--max-worker-port=0", "--node-ip-address=127.0.0.1", f"--port={port}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()


@contextmanager
def registered(url: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """What a server with --ray-discovery starts."""
    command = [sys.executable, "-m", "quire.server.ray_registration", url]
    environment = os.environ | {"RAY_ADDRESS": address}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def states(running: RunningGateway) -> dict[str, object]:
    return {str(worker["url"]): worker["state"] for worker in running.workers().values()}


def test_servers_of_a_cluster_come_and_go(tmp_path: Path) -> None:
    with upstreams(answers("a"), answers("b")) as (stays, goes), cluster() as address:
        config = f'[discovery]\nray = "{address}"\ninterval = 0.2\n'
        with gateway(config, folder=tmp_path) as running:
            wait_for(lambda: _accepts(address), SECONDS)
            with registered(stays.url, address):
                with registered(goes.url, address):
                    both = dict.fromkeys((stays.url, goes.url), "ready")
                    wait_for(lambda: states(running) == both, SECONDS)
                    assert {running.chat().json()["choices"][0]["message"]["content"] for _ in range(30)} == {"a", "b"}
                wait_for(lambda: states(running) == {stays.url: "ready"}, SECONDS)
                assert running.chat().json()["choices"][0]["message"]["content"] == "a"


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0

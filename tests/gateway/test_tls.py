"""TLS on both sides: clients to the gateway, the gateway to a worker that asks for its certificate."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from gateway.gateways import SECONDS, completion, read_request, response, wait_for
from gateway.gateways import gateway as started_gateway
from quire.core.errors import BadRequest
from quire.gateway.config_file import parse_config
from quire.gateway.upstream import ConnectionPool

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 with its key, its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:engines.test", "-days", "2"]
    subprocess.run([*command, "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return folder / "both.pem"


@pytest.fixture
def worker(pem: Path) -> Iterator[str]:
    """Speaks TLS, and only to who shows a certificate that it knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.load_verify_locations(pem)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as tls:
            while (asked := read_request(tls)) is not None:
                models = b'{"data": [{"id": "m"}]}'
                tls.sendall(response(completion() if asked.line.startswith("POST") else models))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_both_sides(pem: Path, worker: str, tmp_path: Path) -> None:
    config = f"""
ssl_certfile = "{pem}"
[faults]
health_interval = 0.1
[[workers]]
url = "{worker}"
name = "good"
ca_file = "{pem}"
client_cert_file = "{pem}"
[[workers]]
url = "{worker}/x"
name = "without a certificate"
models = ["n"]
ca_file = "{pem}"
[[workers]]
url = "{worker}/y"
name = "not verified"
models = ["n"]
client_cert_file = "{pem}"
[[workers]]
url = "{worker}/z"
name = "by its name"
ca_file = "{pem}"
client_cert_file = "{pem}"
tls_name = "engines.test"
[[workers]]
url = "{worker}/other"
name = "by another name"
models = ["n"]
ca_file = "{pem}"
client_cert_file = "{pem}"
tls_name = "other.test"
"""
    with started_gateway(config, folder=tmp_path) as running:
        good = ("good", "by its name")
        wait_for(lambda: all(running.workers()[name]["state"] == "ready" for name in good))
        verified = ssl.create_default_context(cafile=pem)
        with httpx.Client(verify=verified, timeout=SECONDS) as http:
            answer = http.post(f"{running.url}/v1/chat/completions", json={"model": "m", "messages": []})
            assert answer.status_code == 200 and answer.json()["usage"]
            assert http.post(f"{running.url}/v1/chat/completions", json={"model": "n"}).status_code == 503
        states = {worker["state"] for name, worker in running.workers().items() if name not in good}
        assert states == {"unhealthy"}


def test_wrong_files_are_named() -> None:
    with pytest.raises(BadRequest, match=r"cannot use /no\.pem for TLS"):
        parse_config(b'ssl_certfile = "/no.pem"', "x")
    with pytest.raises(BadRequest, match=r"worker h:1: cannot use /no\.pem for TLS"):
        parse_config(b'[[workers]]\nurl = "https://h:1"\nca_file = "/no.pem"', "x")
    with pytest.raises(BadRequest, match="its url is not https"):
        parse_config(b'[[workers]]\nurl = "http://h:1"\nca_file = "/no.pem"', "x")


def test_connections_given_up_are_forgotten(pem: Path, worker: str) -> None:
    """At any step of the loop, while the peer's certificate does not fit."""
    complaints: list[dict[str, Any]] = []

    async def give_up_at_any_step() -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        pool = ConnectionPool(worker, 5.0, ssl.create_default_context(cafile=pem), "other.test")
        for num_steps in list(range(12)) * 8:
            attempt = asyncio.create_task(pool.connect())
            for _ in range(num_steps):
                time.sleep(0.001)  # what the peer sends arrives within the step
                await asyncio.sleep(0)
            attempt.cancel()
            with pytest.raises((asyncio.CancelledError, ssl.SSLError)):
                await attempt
        return pool.num_open

    assert uvloop.run(give_up_at_any_step()) == 0
    assert complaints == []

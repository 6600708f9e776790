"""`quire gateway` as a command: its errors, and the limits of connections."""

import contextlib
import socket
import time
from pathlib import Path

import pytest

from gateway.gateways import SSE_HEAD, Asked, answers, chunk, event, gateway, upstreams, wait_for
from quire.cli.gateway import make_parser
from quire.cli.main import main
from quire.cli.router_flags import ELSEWHERE


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no worker is named"),
        (["--worker", "localhost:8000"], "`localhost:8000` is no address of a worker: write http://localhost:8000"),
        (["--worker", "http://u:p@a:1"], "`a:1` is no address of a worker: write http://HOST:PORT, and keys as"),
        (["--worker", "http://a:1/v1/"], "ends in /v1, with which paths begin: write http://a:1\n"),
        (["http://a:1"], "write --worker http://a:1"),
        (["--worker", "http://a:1", "--port", "99999"], "`port`: expected `int` <= 65535"),
        (["--config", "/no/such.toml"], "cannot read /no/such.toml"),
        (["--worker", "http://a:1", "--polcy", "x"], "did you mean `--policy`?"),
        (["--prefill", "http://a:1", "--decode", "http://b:1"], "give --worker the decode servers"),
        (["--worker-urls", "http://a:1", "--cache-threshold=0.5"], "`cache_threshold` of [cache_aware]"),
        (["--static-backends", "http://a:1,http://b:1"], "write --worker-urls, with spaces"),
        (["--model", "hosted_vllm/m", "--api_base", "http://a:1"], "[models.NAME]"),
        (["--worker", "http://a:1", "--num_workers", "4"], "several gateways share limits by [redis]"),
        (["--worker", "http://a:1", "--policy", "x"], "invalid choice"),
        (["--worker", "http://a:1", "--worker", "http://a:1"], "two workers are called a:1"),
        (["--worker", "http://a:1", "--admin-host", "0.0.0.0"], "admin_key"),
    ],
)
def test_mistakes_are_explained(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('polcy = "session"', "there is no key `polcy` in the top of the file", "did you mean `policy`?"),
        ('[[workers]]\nurll = "http://a:1"', "there is no key `urll` in [[workers]]", "did you mean `url`?"),
        (
            '[[workers]]\nurl = "http://a:1"\nport = 1',
            "no key `port` in [[workers]]",
            "it belongs to the top of the file",
        ),
        ('[models."a.b"]\nrules = [{modle = "m"}]', "no key `modle` in `rules` of [models.NAME]", "`model`?"),
        ('[[workers]]\nname = "a"', "[[workers]] has no `url`", "docs/gateway.md"),
        ('policy = "cache-aware"', "policy is `cache-aware`", "did you mean `cache_aware`?"),
        ('[models.m]\npolicy = "x"', "policy is `x`", "it is one of round_robin, "),
        ("[queue]\nmax_requests = 0", "`queue.max_requests`: expected `int` >= 1", "docs/gateway.md"),
        ("port = \n", "not TOML: Invalid value (at line 1", "docs/gateway.md"),
    ],
)
def test_mistakes_of_a_file_are_explained(
    text: str, message: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gateway.toml").write_text(text)
    assert main(["gateway", "--config", str(tmp_path / "gateway.toml"), "--check"]) == 2
    error, said = capsys.readouterr().err.splitlines()
    assert message in error and hint in said


def test_flags_of_others_are_not_own_flags() -> None:
    assert not make_parser().flags.keys() & ELSEWHERE.keys()


def test_a_file_of_litellm_is_known_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("model_list:\n  - model_name: m\n")
    assert main(["gateway", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "--from-litellm" in capsys.readouterr().err


def test_a_file_can_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[[workers]]\nurl = "http://a:1"\n[[keys]]\nname = "k"\nkey = "a secret"\n')
    assert main(["gateway", "--config", str(file), "--check"]) == 0
    assert "1 worker, 1 key" in capsys.readouterr().out
    file.write_text('[[workers]]\nurl = "http://a:1"\ncolour = 3\n')
    assert main(["gateway", "--config", str(file), "--check"]) == 2
    assert "colour" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gateway", "--worker", "http://127.0.0.1:9", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    flags = ["--worker", "http://127.0.0.1:9", "--port", str(port), "--admin-port", str(port)]
    assert main(["gateway", *flags]) == 2
    assert "choose another `--admin-host` or `--admin-port`" in capsys.readouterr().err


def test_slow_and_idle_and_too_many_clients(tmp_path: Path) -> None:
    def endless(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(SSE_HEAD)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(chunk(event("x" * 60_000)))
        return False

    config = "receive_timeout = 0.3\nsend_timeout = 0.3\nkeep_alive = 0.3\nmax_connections = 3\n"
    with (
        upstreams(answers()) as [only],
        gateway(f'{config}[[workers]]\nurl = "{only.url}"\n', folder=tmp_path) as running,
    ):
        place = ("127.0.0.1", running.port)
        with socket.create_connection(place, timeout=20) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        begin = time.monotonic()
        with socket.create_connection(place, timeout=20) as idle:
            assert idle.recv(1) == b"" and time.monotonic() - begin > 0.2
        only.script = endless
        with socket.create_connection(place, timeout=20) as deaf:
            body = b'{"model": "m", "stream": true, "messages": []}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            deaf.sendall(head + body)
            wait_for(lambda: only.asked)
            wait_for(lambda: next(iter(running.workers().values()))["in_flight"] == 0)
        wait_for(lambda: b"HTTP/1.1 503" in (said := fourth(place)) and b"too_many_connections" in said)


def fourth(place: tuple[str, int]) -> bytes:
    """What the last of four connections is told: nothing, where an earlier one has been idle for too long meanwhile."""
    with contextlib.ExitStack() as held:
        *_, last = (held.enter_context(socket.create_connection(place, timeout=20)) for _ in range(4))
        return last.recv(4096)

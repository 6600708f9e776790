"""Workers that are found in a file and by DNS."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from gateway.gateways import answers, gateway, upstreams, wait_for
from quire.core.errors import BadRequest
from quire.gateway.config import Discovery, WorkerEntry
from quire.gateway.config_file import parse_config
from quire.gateway.discovery import WorkerDiscovery


def test_workers_of_a_file_come_and_go(tmp_path: Path) -> None:
    """A file that cannot be read leaves them as they were; workers of the configuration stay."""
    listed = tmp_path / "workers.json"
    with upstreams(answers("a"), answers("b"), answers("c")) as (one, two, three):
        listed.write_text(json.dumps({"workers": [{"url": two.url, "name": "two"}]}))
        config = f'[[workers]]\nurl = "{one.url}"\nname = "one"\n[discovery]\nfile = "{listed}"\ninterval = 0.02\n'
        with gateway(config, folder=tmp_path) as running:
            wait_for(
                lambda: (
                    {name: each["state"] for name, each in running.workers().items()}
                    == dict.fromkeys(("one", "two"), "ready")
                )
            )
            assert {running.chat().json()["choices"][0]["message"]["content"] for _ in range(20)} == {"a", "b"}
            listed.write_text(json.dumps({"workers": [{"url": three.url, "name": "three"}]}))
            wait_for(lambda: set(running.workers()) == {"one", "three"})
            listed.write_text("{")
            wait_for(lambda: any("stay as they were" in line for line in running.said))
            assert set(running.workers()) == {"one", "three"}
            listed.write_text(json.dumps({"workers": [{"url": "nonsense"}, {"url": two.url}]}))
            wait_for(lambda: any("is no address of a worker" in line for line in running.said))
            assert set(running.workers()) == {"one", "three"}
            listed.write_text('{"workers": []}')
            wait_for(lambda: set(running.workers()) == {"one"})


def looked(
    settings: Discovery, monkeypatch: pytest.MonkeyPatch, *answers: list[str] | OSError
) -> list[list[WorkerEntry]]:
    """What is found when a name has these addresses, one look after the other."""
    found: list[list[WorkerEntry]] = []
    queue = list(answers)

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        answer = queue.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

    async def work() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        discovery = WorkerDiscovery(settings, found.append)
        await asyncio.sleep(0)
        while queue:
            await discovery.look()
        await discovery.close()

    asyncio.run(work())
    return found


def test_every_address_of_a_name_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = WorkerEntry(url="http://engines:8000", kv_events="tcp://engines:5557", api_key="k")
    settings = Discovery(dns=[entry], interval=1000)
    away = OSError("no name server")
    found = looked(settings, monkeypatch, ["10.0.0.2", "10.0.0.1", "10.0.0.2"], away, ["10.0.0.1"], ["fd00::1"])
    assert [[worker.url for worker in workers] for workers in found] == [
        ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ["http://10.0.0.1:8000"],
        ["http://[fd00::1]:8000"],
    ]
    assert found[0][1].kv_events == "tcp://10.0.0.2:5557" and found[0][1].api_key == "k"
    assert found[0][1].label == "10.0.0.2:8000"


def test_a_real_name_is_resolved(tmp_path: Path) -> None:
    with upstreams(answers("a")) as (one,):
        config = f'[discovery]\ninterval = 0.05\n[[discovery.dns]]\nurl = "http://localhost:{one.port}"\n'
        with gateway(config, folder=tmp_path) as running:
            wait_for(lambda: running.workers().get(f"127.0.0.1:{one.port}", {}).get("state") == "ready")
            assert running.chat().status_code == 200


def test_certificates_of_addresses_are_for_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with TLS could not be found by DNS."""
    entries = [WorkerEntry(url="https://engines"), WorkerEntry(url="https://engines:9", tls_name="other")]
    parse_config(b'[[discovery.dns]]\nurl = "https://engines:8000"\n', "c")
    [found] = looked(Discovery(dns=entries, interval=1000), monkeypatch, ["10.0.0.1"], ["10.0.0.2"])
    assert [(each.url, each.tls_name) for each in found] == [
        ("https://10.0.0.1:443", "engines"),
        ("https://10.0.0.2:9", "other"),
    ]


def test_ray_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.gateway.config.find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"discovery.ray needs Ray: pip install 'quire\[ray\]'"):
        parse_config(b'[discovery]\nray = "auto"\n', "c")

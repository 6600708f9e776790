"""What docs/gateway.md and deploy/ say about the gateway is so."""

import asyncio
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from quire.gateway.config import GatewayConfig, Table
from quire.gateway.config_file import parse_config
from quire.gateway.exposition import gateway_families
from quire.gateway.gateway import Gateway
from quire.gateway.routes import ANY_PATHS, route_kind
from server.running import running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gateway.md").read_text()


def example() -> str:
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    return text.replace('api_key_env = "GPU_1_KEY"', 'api_key = "x"').replace('"audit.jsonl"', '"/tmp/audit.jsonl"')


def test_the_example_is_a_configuration_and_has_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.gateway.config.find_spec", lambda name: True)  # as if Ray were installed
    config = parse_config(example().encode(), "docs/gateway.md")
    default = GatewayConfig()
    assert len(config.workers) == 2 and len(config.models) == 4 and config.keys[0].limits.max_concurrency == 8
    for shown, real in ((config.queue, default.queue), (config.faults, default.faults)):
        assert shown == real
    assert config.cache_aware == default.cache_aware


def test_every_field_is_on_the_page() -> None:
    written = set(re.findall(r"\w+", PAGE))
    missing = [
        f"{table.__name__}.{field.name}"
        for table in (GatewayConfig, *_tables(Table))
        for field in msgspec.structs.fields(table)
        if field.name not in written
    ]
    assert not missing


def _tables(base: type) -> list[type]:
    return [each for child in base.__subclasses__() for each in (child, *_tables(child))]


def families() -> dict[str, tuple[str, str, str]]:
    async def found() -> dict[str, tuple[str, str, str]]:
        gateway = Gateway(GatewayConfig())
        rows = {
            family.name + "_total" * (family.type == "counter"): (
                family.type,
                ", ".join(family._labelnames),  # type: ignore[attr-defined]
                family.documentation,
            )
            for family in gateway_families(gateway)
        }
        await gateway.close()
        return rows

    return asyncio.run(found())


def test_every_metric_is_on_the_page() -> None:
    rows = re.findall(r"^\| `(quire_gateway_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert {name: (kind, labels.strip(), what) for name, kind, labels, what in rows} == families()


def test_deployed_files_are_good() -> None:
    config = parse_config((ROOT / "deploy" / "gateway" / "gateway.toml").read_bytes(), "gateway.toml")
    assert len(config.workers) == 2
    with_keys = re.sub(r"^# (?=\[\[|\w+ =)", "", (ROOT / "deploy" / "gateway" / "gateway.toml").read_text(), flags=re.M)
    assert tomllib.loads(with_keys)["keys"][0]["name"] == "alice"
    for unit in (ROOT / "deploy" / "systemd").iterdir():
        assert re.search(r"^ExecStart=/usr/local/bin/quire (serve|gateway) ", unit.read_text(), re.MULTILINE)


# Of the server's paths, these are the gateway's own, or not for the clients of a fleet.
OWN = {"/v1/models", "/models", "/api/tags", "/health", "/v1/health", "/ping", "/ready", "/version"}
# fmt: off
KEPT_BACK = [
    "/metrics", "/abort_requests", "/abort_request", "/load", "/reset_prefix_cache", "/flush_cache", "/live", "/plan",
    "/slots", "/slots/x", "/", "/page/x", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/api/pull",
    "/sleep", "/wake_up", "/is_sleeping",
    "/api/delete", "/api/copy", "/api/create", "/api/push", "/api/blobs/x",
    "/openapi.json", "/v2/models", "/v1/models/x", "/v2/models/x/ready", "/v2/models/x/versions/1/ready",
    "/v2/models/x", "/v2/models/x/versions/1",
]
# fmt: on


def test_every_path_of_the_server_is_passed_answered_or_kept_back() -> None:
    """A new route of the server is put into one of these."""
    with running() as server:
        described = server.http.get("/openapi.json").json()["paths"]
    undecided = []
    for template, methods in described.items():
        path = re.sub(r"\{\w+\}", "x", template)
        for method in methods:
            passed = route_kind(method.upper(), path) is not None
            if not passed and path not in OWN and path not in KEPT_BACK:
                undecided.append(f"{method} {template}")
    assert not undecided
    assert all(route_kind("POST", path) is None for path in KEPT_BACK if path != "/")
    assert all(route_kind("GET", path) for path in ANY_PATHS)

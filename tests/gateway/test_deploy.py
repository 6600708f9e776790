"""The files of deploy/ as far as they can be checked without a cluster: commands, configurations, names, shapes."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from quire.cli.gateway import make_parser as gateway_parser
from quire.cli.main import main
from quire.engine.kv_events_config import read_kv_events_config
from quire.gateway.config_file import parse_config
from quire.gateway.routes import ANY_PATHS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS = [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text())]

# The fields of Kubernetes that are used here, each where it belongs: a field in another place, or misspelt, is refused.
ANYTHING: dict[str, Any] = {}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def struct(required: str = "", **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
METADATA = struct("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, labels=TEXTS)
SELECTOR = struct("matchLabels", matchLabels=TEXTS)
PORT = struct("port", name=TEXT, port=NUMBER, targetPort={"type": ["string", "integer"]})
PROBE = struct(
    "httpGet",
    httpGet=struct("path port", path=TEXT, port={"type": ["string", "integer"]}),
    periodSeconds=NUMBER,
    failureThreshold=NUMBER,
)
AMOUNTS = struct(cpu=TEXT, memory=TEXT, storage=TEXT)
RESOURCES = struct(requests=AMOUNTS, limits=AMOUNTS)
CONTAINER = struct(
    "name image",
    name=TEXT,
    image={"type": "string", "pattern": "^[^:]+:[^:]+$"},
    args=many(TEXT),
    ports=many(struct("containerPort", name=TEXT, containerPort=NUMBER)),
    env=many(
        struct("name", name=TEXT, valueFrom=struct(secretKeyRef=struct("name key", name=TEXT, key=TEXT)), value=TEXT)
    ),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=RESOURCES,
    volumeMounts=many(struct("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
POD = struct(
    "metadata spec",
    metadata=struct("labels", labels=TEXTS, annotations=TEXTS),
    spec=struct(
        "containers",
        containers=many(CONTAINER),
        terminationGracePeriodSeconds=NUMBER,
        securityContext=struct(runAsNonRoot=FLAG, runAsUser=NUMBER, fsGroup=NUMBER),
        volumes=many(struct("name", name=TEXT, configMap=struct("name", name=TEXT), emptyDir=struct(sizeLimit=TEXT))),
    ),
)
CLAIM = struct(
    "metadata spec", metadata=METADATA, spec=struct("accessModes", accessModes=many(TEXT), resources=RESOURCES)
)
SPECS = {
    ("v1", "Service"): struct("ports", clusterIP=TEXT, selector=TEXTS, ports=many(PORT)),
    ("apps/v1", "Deployment"): struct("selector template", replicas=NUMBER, selector=SELECTOR, template=POD),
    ("apps/v1", "StatefulSet"): struct(
        "selector template serviceName",
        serviceName=TEXT,
        replicas=NUMBER,
        podManagementPolicy={"enum": ["OrderedReady", "Parallel"]},
        selector=SELECTOR,
        template=POD,
        volumeClaimTemplates=many(CLAIM),
    ),
    ("policy/v1", "PodDisruptionBudget"): struct("selector", maxUnavailable=NUMBER, selector=SELECTOR),
}


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_objects_have_the_fields_of_their_kind(item: dict[str, Any]) -> None:
    kind = item["apiVersion"], item["kind"]
    if kind == ("v1", "ConfigMap"):
        schema = struct("metadata data", apiVersion=ANYTHING, kind=ANYTHING, metadata=METADATA, data=TEXTS)
    else:
        schema = struct("metadata spec", apiVersion=ANYTHING, kind=ANYTHING, metadata=METADATA, spec=SPECS[kind])
    jsonschema.validate(item, schema)


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in OBJECTS if item["kind"] == kind}


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for item in (*of_kind("Deployment").values(), *of_kind("StatefulSet").values()):
        yield item, item["spec"]["template"]


def test_objects_find_each_other() -> None:
    labels = []
    for item, pod in pods():
        assert item["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        labels.append(pod["metadata"]["labels"])
        [container] = pod["spec"]["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        claims = {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])}
        assert mounts == claims | {volume["name"] for volume in pod["spec"].get("volumes", [])}
        for volume in pod["spec"].get("volumes", []):
            assert "configMap" not in volume or volume["configMap"]["name"] in of_kind("ConfigMap")
        named = {port["name"] for port in container["ports"]}
        probes = [
            container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in container
        ]
        assert all(probe["httpGet"]["port"] in named for probe in probes)
        assert {probe["httpGet"]["path"] for probe in probes} <= {"/ready", "/health", *ANY_PATHS}
    for service in of_kind("Service").values():
        assert any(service["spec"]["selector"].items() <= each.items() for each in labels)
    for budget in of_kind("PodDisruptionBudget").values():
        assert any(budget["spec"]["selector"]["matchLabels"].items() <= each.items() for each in labels)


def commands() -> Iterator[list[str]]:
    for _, pod in pods():
        for container in pod["spec"]["containers"]:
            if container["image"].startswith("quire"):
                yield container["args"]
    for service in COMPOSE["services"].values():
        if service["image"] == "quire":
            yield service["command"]
    for unit in (DEPLOY / "systemd").glob("*.service"):
        [line] = re.findall(r"^ExecStart=/usr/local/bin/quire (.*)$", unit.read_text(), re.MULTILINE)
        yield line.replace("%i", "8001").split()


def test_every_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags exist, and their values are good: a command that ends with a wrong flag complains about nothing else."""
    seen = 0
    for words in commands():
        seen += 1
        if words[0] == "gateway":
            gateway_parser().parse(words[1:])
            continue
        assert main([*words, "--no-such-flag"]) == 2
        assert "--no-such-flag" in capsys.readouterr().err
        for word in words:
            if word.startswith("--kv-events-config="):
                config = read_kv_events_config(word.partition("=")[2])
                assert config is not None and config.binds and config.replay_endpoint
    assert seen >= 6


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """With a program that is there: units of installed programs are checked."""
    for unit in (DEPLOY / "systemd").glob("*.service"):
        (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/local/bin/quire", "/bin/sh"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())], capture_output=True, text=True
    )
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


def test_configurations_of_gateways_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    [container] = of_kind("Deployment")["quire-gateway"]["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], "from a secret")
    compose = parse_config((DEPLOY / "compose" / "gateway.toml").read_bytes(), "compose")
    assert {worker.name for worker in compose.workers} == {"engine-0", "engine-1"} <= COMPOSE["services"].keys()
    assert compose.redis is not None and "redis" in COMPOSE["services"]
    written = of_kind("ConfigMap")["quire-gateway"]["data"]["gateway.toml"]
    config = parse_config(written.encode(), "ConfigMap")
    [found] = config.discovery.dns
    assert found.url == "http://quire-engines:8000" and "quire-engines" in of_kind("Service")
    assert config.redis is not None and "quire-redis" in of_kind("Service")
    assert config.admin_secret == "from a secret"
    assert config.admin_port in [port["containerPort"] for port in container["ports"]]


def test_the_files_of_compose_are_there() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], name
        assert set(service.get("depends_on", [])) <= COMPOSE["services"].keys()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is open to others unless its owner says so"
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    for job in scraped["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            assert target.split(":")[0] in COMPOSE["services"]
    assert all((DEPLOY / "prometheus" / Path(rule).name).exists() for rule in scraped["rule_files"])
    source = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_every_alert_has_a_line_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    known = set(re.findall(r"^\| (Quire\w+) \|", page, re.MULTILINE))
    alerts = set()
    for file in (DEPLOY / "prometheus").glob("*alerts.yml"):
        for rule in yaml.safe_load(file.read_text())["groups"][0]["rules"]:
            alerts.add(rule["alert"])
            assert rule["annotations"]["runbook"] == "docs/operating.md#alerts"
    assert alerts == known


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules() -> None:
    files = [str(path) for path in (DEPLOY / "prometheus").glob("*alerts.yml")]
    for words in (["check", "rules", *files], ["test", "rules", str(DEPLOY / "prometheus" / "alerts-test.yml")]):
        checked = subprocess.run(["promtool", *words], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_tried() -> None:
    tried = (DEPLOY / "prometheus" / "alerts-test.yml").read_text()
    for file in (DEPLOY / "prometheus").glob("*alerts.yml"):
        for rule in yaml.safe_load(file.read_text())["groups"][0]["rules"]:
            assert f'alertname="{rule["alert"]}"' in tried


def test_what_make_fleet_writes_is_good(tmp_path: Path) -> None:
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import fleet
    finally:
        sys.path.pop(0)
    ports = fleet.Ports(8080)
    config = parse_config(fleet.gateway_config(ports, "smollm2", 3, True, True).encode(), "fleet")
    assert len({worker.url for worker in config.workers}) == len({worker.kv_events for worker in config.workers}) == 3
    assert config.models["smollm2"].tokenizer == "smollm2" and config.redis is not None
    scraped = json.loads(fleet.prometheus_config(ports, 2))
    assert scraped["scrape_configs"][1]["static_configs"] == [{"targets": ["127.0.0.1:8081"]}]
    words = fleet.engine_command(ports, 1, "smollm2", True, [])
    assert read_kv_events_config(words[-1]) is not None

"""deploy/keda: objects as KEDA defines them, that name what is there, and numbers that the gateway has."""

import copy
import importlib.util
import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from gateway.gateways import Asked, RunningGateway, answers, gateway, upstreams, wait_for

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "keda").glob("*.yaml"))
OBJECTS = [each for path in FILES for each in yaml.safe_load_all(path.read_text())]
DEPLOYED = [
    each for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml") for each in yaml.safe_load_all(path.read_text())
]
SCALED = {item["spec"]["triggers"][0]["type"]: item for item in OBJECTS if item["kind"] == "ScaledObject"}


def check_keda() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_keda", ROOT / "tools" / "check_keda.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = check_keda().check


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_objects_are_those_of_keda(item: dict[str, Any]) -> None:
    CHECK(item)


MISTAKES: list[Callable[[dict[str, Any]], object]] = [
    lambda item: item["spec"].update(minReplicas=1),
    lambda item: item["spec"]["triggers"][0]["metadata"].update(targetValue=16),
    lambda item: item["spec"]["triggers"][0]["metadata"].update(url="http://gateway:8081/scaling"),
    lambda item: item["spec"]["triggers"][0]["metadata"].pop("valueLocation"),
    lambda item: item["spec"]["triggers"][0].update(type="metric-api"),
    lambda item: item["spec"].pop("scaleTargetRef"),
    lambda item: item.update(apiVersion="keda.k8s.io/v1alpha1"),
]


@pytest.mark.parametrize("spoil", MISTAKES)
def test_mistakes_are_found(spoil: Callable[[dict[str, Any]], object]) -> None:
    item = copy.deepcopy(SCALED["metrics-api"])
    spoil(item)
    with pytest.raises(jsonschema.ValidationError):
        CHECK(item)


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in DEPLOYED if item["kind"] == kind}


def test_they_name_what_is_deployed() -> None:
    assert set(SCALED) == {"metrics-api", "prometheus"}
    for item in SCALED.values():
        target = item["spec"]["scaleTargetRef"]
        assert target["name"] in named(target["kind"]), "the engines"
        assert item["spec"]["minReplicaCount"] >= 1, "requests without any worker do not wait"
    [trigger] = SCALED["metrics-api"]["spec"]["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    service = named("Service")[url.netloc.split(".")[0]]
    [port] = service["spec"]["ports"]
    [container] = named("Deployment")["quire-gateway"]["spec"]["template"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": url.port} in container["ports"], "KEDA asks pods, by this port"
    [authentication] = [item for item in OBJECTS if item["kind"] == "TriggerAuthentication"]
    assert authentication["metadata"]["name"] == trigger["authenticationRef"]["name"]
    [given] = authentication["spec"]["secretTargetRef"]
    [variable] = container["env"]
    assert given == {"parameter": "token", **variable["valueFrom"]["secretKeyRef"]}


def test_the_gateway_has_the_numbers(tmp_path: Path) -> None:
    """As both scalers ask for them, while requests run and wait."""
    go = threading.Event()

    def waits(connection: socket.socket, asked: Asked) -> bool:
        assert go.wait(20)
        return answers()(connection, asked)

    config = 'admin_key = "secret"\n[models.auto]\ntargets = [{model = "smollm2"}]\n'
    with upstreams(waits, model="smollm2") as [only]:
        config += f'[[workers]]\nurl = "{only.url}"\nname = "w"\nmax_in_flight = 2\n'
        with gateway(config, folder=tmp_path) as running, ThreadPoolExecutor(5) as pool:
            running.http.headers["authorization"] = "Bearer secret"
            asked = [pool.submit(running.chat, "auto") for _ in range(5)]
            wait_for(lambda: scaled(running)["requests"] == 5)
            view = scaled(running)
            assert (view["requests_in_flight"], view["requests_waiting"], view["capacity"]) == (2, 3, 2)
            assert from_metrics(running) == 5
            assert running.http.get(f"{running.admin}/scaling?model=smollm2").json() == view
            assert running.http.get(f"{running.admin}/scaling/").json() == view, "of all models"
            assert running.http.get(f"{running.admin}/scaling/none").status_code == 404
            alias = running.http.get(f"{running.admin}/scaling/auto")
            assert alias.status_code == 400 and "leads to `smollm2`" in alias.text, "zero would end all engines"
            go.set()
            assert all(each.result().status_code == 200 for each in asked)
            wait_for(lambda: scaled(running)["requests"] == 0)


def scaled(running: RunningGateway) -> dict[str, int]:
    trigger = SCALED["metrics-api"]["spec"]["triggers"][0]["metadata"]
    view = json.loads(running.http.get(running.admin + urlsplit(trigger["url"]).path).text)
    assert isinstance(view[trigger["valueLocation"]], int)
    return dict(view)


def from_metrics(running: RunningGateway) -> float:
    query = SCALED["prometheus"]["spec"]["triggers"][0]["metadata"]["query"]
    match = re.fullmatch(r"sum\(quire_gateway_(\w+)\{(.*)\}\)", query)
    assert match is not None
    return running.metric(match[1], match[2])

"""POST /plan: the plans of the page, made beside an engine that serves."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from page.serving import Served, served
from quire.cli.plan import run as quire_plan
from quire.client import plan_process, planner, this_gpu
from quire.client.plan_process import plan_reply
from quire.client.plan_request import PlanRequest
from quire.client.planner import Planner
from quire.core.errors import BadRequest, QueueFull, Unavailable
from quire.server.options import ServerOptions


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Served]:
    with served(default_model, ServerOptions(api_key=["open sesame"])) as server:
        server.http.headers["authorization"] = "Bearer open sesame"
        yield server


def ask(server: Served, **body: object) -> httpx.Response:
    return server.http.post("/plan", json=body)


def plan(server: Served, **body: object) -> dict[str, Any]:
    response = ask(server, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["plan"]
    return found


def test_it_is_what_the_command_prints(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--shape llama-3.1-8b --format awq --hardware h100 --users 64 --context 8192 --tp 2 --price 2 --json"
    quire_plan(flags.split())
    printed = json.loads(capsys.readouterr().out)
    made = plan(server, shape="llama-3.1-8b", format="awq", hardware="h100", users=64, context=8192, tp=2, price=2.0)
    del made["known"], made["explain"], made["note"], made["kv"]["attention"], made["cost"]["source"]
    assert made == json.loads(json.dumps(printed))


def test_the_plan_of_the_served_model_stands_beside_the_truth(server: Served) -> None:
    reply = ask(server, users=2, context=2048).json()
    here, made = reply["served"], reply["plan"]
    assert here["name"] == made["model"]["name"] == server.engine.info.name
    assert here["weights"] <= made["memory"]["weights"] < 1.05 * here["weights"]  # pages and panels
    assert made["kv"]["bytes_per_token"] == here["kv_bytes_per_token"]
    assert made["memory"]["kv_cache"] == 2 * 2048 * here["kv_bytes_per_token"]
    assert here["weights"] < here["resident"] < made["hardware"]["memory_bytes"]
    assert here["cache_tokens"] * here["kv_bytes_per_token"] == here["kv_cache"]


@pytest.mark.parametrize(
    "body",
    [
        {"users": 0}, {"users": 1 << 20}, {"context": 0}, {"context": 1 << 30}, {"tp": 0}, {"tp": 5000},
        {"loras": -1}, {"rank": 0}, {"price": -1}, {"kv_cache_dtype": "int3"}, {"shape": "llama-9"},
        {"shape": "mistral-7b", "format": "q9"}, {"format": "q4_0"}, {"hardware": "h1000"}, {"tp": 2},
        {"shape": "deepseek-v3", "kv_cache_dtype": "int8"}, {"usres": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_named(server: Served, body: dict[str, object]) -> None:
    response = ask(server, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == list(body)[-1] and error["message"]


def test_who_may_plan(server: Served) -> None:
    assert httpx.post(f"{server.url}/plan", json={}).status_code == 401
    assert ask(server, model="another").status_code == 404


def test_a_machine_that_was_never_measured_is_not_measured_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default_model: Path
) -> None:
    monkeypatch.setattr(plan_process, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr("quire.planning.this_machine.measure", lambda threads: pytest.fail("it is measured"))
    reply = plan_reply(PlanRequest(name="m", path=str(default_model), users=9, context=4096, machine_memory=1 << 30))
    assert list(tmp_path.iterdir()) == []
    assert "`quire plan`" in reply["note"]
    assert reply["memory"]["total"] > 0 and reply["kv"]["users_by_context"]
    assert reply["tokens_per_second"] is None and reply["decode"] is None and reply["cost"] is None


@pytest.mark.parametrize(
    ("name", "row"),
    [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
     ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L4", "l4"), ("NVIDIA A10", "a10")],
)  # fmt: skip
def test_the_gpu_of_a_server_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, row: str) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {name}\nIRQ: 36\n")
    monkeypatch.setattr(this_gpu, "DRIVER", tmp_path)
    reply = plan_reply(PlanRequest(name="m", shape="smollm2-135m", on_gpu=True, machine_memory=1))
    assert reply["hardware"]["name"] == row and reply["note"] is None


def test_a_gpu_that_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(this_gpu, "DRIVER", tmp_path)
    with pytest.raises(BadRequest, match="`unknown`, which is not known") as refused:
        plan_reply(PlanRequest(name="m", shape="smollm2-135m", on_gpu=True))
    assert refused.value.param == "hardware" and "h100" in refused.value.hint


def test_plans_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(Planner, "_ask", lambda self, line: asked.append(line) or b"{}")
    monkeypatch.setattr(planner, "MAX_PLANS", 2)
    plans = Planner()

    async def main() -> None:
        for users in (1, 2, 1, 3, 1, 2):
            await plans.plan(PlanRequest(name="m", users=users))
        monkeypatch.setattr(planner, "MAX_WAITING", 0)
        with pytest.raises(QueueFull):
            await plans.plan(PlanRequest(name="m", users=9))

    asyncio.run(main())
    assert [json.loads(line)["users"] for line in asked] == [1, 2, 3, 2], "the two that were used last are remembered"


def test_a_server_that_stops_does_not_wait_for_a_plan() -> None:
    plans = Planner()

    async def main() -> None:
        making = asyncio.create_task(plans.plan(PlanRequest(name="m", shape="deepseek-v3", hardware="h200")))
        while plans._process is None:
            await asyncio.sleep(0.01)
        assert not making.done()

    asyncio.run(main())
    assert plans._process is None


def test_a_process_that_takes_too_long_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, request = Planner(), PlanRequest(name="m", shape="smollm2-135m", hardware="h100")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(planner, "PLAN_TIMEOUT", 0.01)
            with pytest.raises(Unavailable):
                await plans.plan(request)
        assert json.loads(await plans.plan(request))["memory"]

    asyncio.run(main())
    assert plans._process is not None
    pid = plans._process.pid
    plans.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

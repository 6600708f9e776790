"""Scripts that manage LiteLLM's keys go on against the admin listener, in LiteLLM's words."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.gateways import RunningGateway, answers, gateway, upstreams

CONFIG = """
state_dir = "{folder}/state"
admin_key = "sk-1234"
[models.m]
price = {{prompt = 0.5, output = 1.0}}
[models.alias]
targets = [{{model = "m"}}]
[[workers]]
url = "{url}"
"""


@pytest.fixture
def running(tmp_path: Any) -> Iterator[RunningGateway]:
    with (
        upstreams(answers(prompt=0, output=800)) as [only],
        gateway(CONFIG.format(folder=tmp_path, url=only.url), folder=tmp_path) as running,
    ):
        running.http.headers["authorization"] = "Bearer sk-1234"
        yield running


def post(running: RunningGateway, path: str, **body: object) -> dict[str, Any]:
    answer = running.http.post(running.admin + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_the_life_of_a_key(running: RunningGateway) -> None:
    body = {"models": ["m"], "max_budget": 0.002, "budget_duration": "30d", "duration": "30d", "rpm_limit": 100}
    made = post(running, "/key/generate", key_alias="alice", metadata={}, team_id=None, **body)
    key = {"authorization": f"Bearer {made['key']}"}
    days = datetime.fromisoformat(made["expires"]) - datetime.now(UTC)
    assert 29 < days.total_seconds() / 86400 <= 30 and made["budget_duration"] == "30d"
    assert running.chat(headers=key).status_code == 200
    info = running.http.get(f"{running.admin}/key/info", params={"key": made["key"]}).json()["info"]
    assert (info["key_alias"], info["spend"], info["max_budget"], info["rpm_limit"]) == ("alice", 0.0008, 0.002, 100)
    own = running.http.get(f"{running.url}/key/info", headers=key).json()["info"]
    assert own == info, "who has a key may ask what is left of it"
    assert post(running, "/key/update", key=made["key"], max_budget=0.0001)["budget_duration"] == "30d"
    assert running.chat(headers=key).status_code == 429
    rotated = post(running, f"/key/{info['token']}/regenerate")
    post(running, "/key/update", key=rotated["key"], max_budget=1)
    assert running.chat(headers=key).status_code == 401
    key = {"authorization": f"Bearer {rotated['key']}"}
    assert running.chat(headers=key).status_code == 200
    post(running, "/key/block", key=rotated["key"])
    assert running.chat(headers=key).status_code == 401
    post(running, "/key/unblock", key=rotated["key"])
    assert [each["spend"] for each in running.http.get(f"{running.admin}/spend/keys").json()] == [0.0016]
    assert running.http.get(f"{running.admin}/key/list").json()["keys"] == ["alice"]
    assert post(running, "/key/delete", keys=[rotated["key"]]) == {"deleted_keys": ["alice"]}
    assert running.chat(headers=key).status_code == 401


def test_a_budget_without_a_duration_is_for_all_time(running: RunningGateway) -> None:
    made = post(running, "/key/generate", max_budget=1, models=[])
    assert made["budget_duration"] is None and made["models"] == []
    [shown] = running.http.get(f"{running.admin}/keys").json()["keys"]
    assert shown["budget_period"] == "total" and shown["models"] is None and shown["name"].startswith("key-")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/key/generate", {"team_id": "t"}, "of the group `t`, and there is none of that name: write [[groups]]"),
        ("/key/generate", {"user_id": "u"}, "make a key for each user"),
        ("/key/generate", {"colour": "red"}, "keys have no colour here"),
        ("/key/generate", {"budget_duration": "5d"}, "write 1h, 1d, 7d or 30d"),
        ("/key/generate", {"duration": "soon"}, "write 30s, 30m"),
        ("/key/generate", {"rpm_limit": "many"}, "requests_per_minute"),
        ("/key/delete", {"keys": ["sk-none"]}, "no key is that one"),
        ("/key/update", {"max_budget": 1}, "no key is named"),
        ("/key/bulk_update", {}, "of LiteLLM's paths there are"),
    ],
)
def test_what_is_not_here_is_refused_by_name(running: RunningGateway, path: str, body: object, said: str) -> None:
    answer = running.http.post(running.admin + path, json=body)
    assert 400 <= answer.status_code < 500 and said in answer.text, answer.text
    assert running.http.get(f"{running.admin}/key/list").json()["keys"] == []


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/key/generate", "the admin listener has it"),
        ("GET", "/spend/logs", "the admin listener has it"),
        ("POST", "/team/new", "POST /keys of the admin listener"),
        ("POST", "/model/new", "[models.NAME]"),
        ("GET", "/global/spend", "audit_log"),
        ("GET", "/ui/", "has a page"),
        ("GET", "/health/services", "/workers"),
    ],
)
def test_the_main_listener_says_where_things_are(running: RunningGateway, method: str, path: str, said: str) -> None:
    key = post(running, "/key/generate")["key"]
    answer = running.http.request(method, running.url + path, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 404 and said in answer.text


@pytest.mark.parametrize("path", ["/model/info", "/v1/model/info"])
def test_models_are_described_with_their_cost(running: RunningGateway, path: str) -> None:
    key = post(running, "/key/generate", models=["m", "alias"])["key"]
    models = running.http.get(running.url + path, headers={"authorization": f"Bearer {key}"}).json()["data"]
    alias, model = sorted(models, key=lambda each: each["model_name"])
    assert alias["litellm_params"]["model"] == "m"
    assert model["model_info"]["input_cost_per_token"] == 5e-7 and model["model_info"]["output_cost_per_token"] == 1e-6

"""Keys that are made while the gateway runs: they hold at once, and after a restart with what they have spent."""

import hashlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.gateways import RunningGateway, answers, gateway, upstreams, wait_for
from gateway.redis_server import RedisServer, needs_redis
from quire.core.errors import BadRequest
from quire.gateway.config import GatewayKey
from quire.gateway.state_folder import StateFolder, StateLost

PRICED = "[models.m]\nprice = {output = 1.0}\n"  # an answer of 800 tokens costs 0.0008


@contextmanager
def keeping(folder: Path, url: str, more: str = "") -> Iterator[RunningGateway]:
    """A gateway that keeps its state in `folder`/state."""
    top = f'state_dir = "{folder}/state"\nadmin_key = "boss"\n'
    with gateway(f'{top}{more}{PRICED}[[workers]]\nurl = "{url}"\n', folder=folder) as running:
        running.http.headers["authorization"] = "Bearer boss"
        yield running


def status_of(running: RunningGateway, key: str) -> int:
    return running.chat(headers={"authorization": f"Bearer {key}"}).status_code


def test_a_key_is_made_used_blocked_rotated_and_removed(tmp_path: Path) -> None:
    with upstreams(answers(output=800)) as [only], keeping(tmp_path, only.url) as running:
        assert running.chat(headers={"authorization": ""}).status_code == 401, "without any key nothing is open"
        http, keys = running.http, f"{running.admin}/keys"
        made = http.post(keys, json={"name": "alice", "models": ["m"], "budget": 0.001, "budget_period": "day"})
        assert made.status_code == 201 and made.json()["key"].startswith("sk-")
        key = made.json()["key"]
        assert status_of(running, key) == 200
        shown = http.get(f"{keys}/alice").json()
        assert (shown["spent"], shown["budget_left"], shown["budget_period"]) == (0.0008, 0.0002, "day")
        assert key not in http.get(keys).text and hashlib.sha256(key.encode()).hexdigest() not in http.get(keys).text
        assert [status_of(running, key) for _ in range(2)] == [200, 429], "passed by one request at most"
        assert http.patch(f"{keys}/alice", json={"budget": 1.0}).json()["budget_left"] == pytest.approx(1 - 0.0016)
        assert status_of(running, key) == 200
        assert http.post(f"{keys}/alice/block").json()["blocked"] is True
        refused = running.chat(headers={"authorization": f"Bearer {key}"})
        assert refused.status_code == 401 and "key `alice` is blocked" in refused.text
        http.post(f"{keys}/alice/unblock")
        other = http.post(f"{keys}/alice/rotate").json()
        assert (status_of(running, key), status_of(running, other["key"])) == (401, 200)
        assert other["spent"] == pytest.approx(0.0024), "another secret has not bought another budget"
        assert http.delete(f"{keys}/alice").status_code == 200
        assert (status_of(running, other["key"]), http.get(f"{keys}/alice").status_code) == (401, 404)


@pytest.mark.parametrize("killed", [False, True])
def test_keys_and_what_they_spent_are_there_after_a_restart(tmp_path: Path, killed: bool) -> None:
    written = '[[keys]]\nname = "written"\nkey = "k-written"\nbudget = 0.001\n'
    spent = tmp_path / "state" / "spent.json"
    with upstreams(answers(output=800)) as [only]:
        with keeping(tmp_path, only.url, written) as running:
            key = running.http.post(f"{running.admin}/keys", json={"name": "made", "budget": 0.001}).json()["key"]
            assert [status_of(running, each) for each in (key, "k-written")] == [200, 200]
            if killed:
                wait_for(lambda: spent.exists() and len(json.loads(spent.read_bytes())) == 2)
                running.kill()
        with keeping(tmp_path, only.url, written) as running:
            for each in (key, "k-written"):
                assert [status_of(running, each) for _ in range(2)] == [200, 429], "not 200 twice: some is spent"
    assert key not in (tmp_path / "state" / "keys.json").read_text()


def test_an_expired_key_is_refused_by_its_date(tmp_path: Path) -> None:
    with upstreams(answers()) as [only], keeping(tmp_path, only.url) as running:
        times = {"over": datetime.now(UTC) - timedelta(seconds=1), "later": datetime.now(UTC) + timedelta(hours=1)}
        for name, expires in times.items():
            body = {"name": name, "key": f"k-{name}", "expires": expires.isoformat()}
            assert running.http.post(f"{running.admin}/keys", json=body).status_code == 201
        assert status_of(running, "k-later") == 200
        refused = running.chat(headers={"authorization": "Bearer k-over"})
        assert refused.status_code == 401 and "key `over` has expired, at 20" in refused.text


def test_the_digest_of_a_key_can_be_given(tmp_path: Path) -> None:
    """Keys of LiteLLM's database are known by their SHA-256 only."""
    with upstreams(answers()) as [only], keeping(tmp_path, only.url) as running:
        digest = hashlib.sha256(b"sk-from-litellm").hexdigest()
        made = running.http.post(f"{running.admin}/keys", json={"name": "old", "sha256": digest}).json()
        assert "key" not in made and status_of(running, "sk-from-litellm") == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/keys", {"name": "two words"}, 400, "name"),
        ("POST", "/keys", {"name": "a", "budgte": 1}, 400, "did you mean `budget`?"),
        ("POST", "/keys", {"name": "a", "budget_period": "dya"}, 400, "did you mean `day`?"),
        ("POST", "/keys", {"name": "written"}, 400, "the same name `written`"),
        ("POST", "/keys", {"name": "a", "key": "k-written"}, 400, "have the same key"),
        ("POST", "/keys", ["a"], 400, "not a JSON object"),
        ("PATCH", "/keys/written", {"blocked": True}, 400, "is one of the configuration"),
        ("PATCH", "/keys/made", {"name": "b"}, 400, "cannot be changed"),
        ("DELETE", "/keys/none", None, 404, "there is no key `none`"),
        ("PUT", "/keys/made", None, 405, "PUT is not for"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    method: str, path: str, body: object, status: int, said: str, asking: RunningGateway
) -> None:
    before = asking.http.get(f"{asking.admin}/keys").json()
    answer = asking.http.request(method, asking.admin + path, json=body)
    assert answer.status_code == status and said in answer.text, answer.text
    assert asking.http.get(f"{asking.admin}/keys").json() == before


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("asking")
    written = '[[keys]]\nname = "written"\nkey = "k-written"\n'
    with upstreams(answers()) as [only], keeping(folder, only.url, written) as running:
        running.http.post(f"{running.admin}/keys", json={"name": "made"})
        yield running


def test_without_a_folder_no_key_is_made(tmp_path: Path) -> None:
    with upstreams(answers()) as [only], gateway(f'[[workers]]\nurl = "{only.url}"\n', folder=tmp_path) as running:
        refused = running.http.post(f"{running.admin}/keys", json={"name": "a"})
        assert refused.status_code == 400 and "state_dir" in refused.text
        assert running.chat().status_code == 200, "the gateway is as open as before"


def test_a_name_of_the_file_that_was_made_before_is_refused(tmp_path: Path) -> None:
    with upstreams(answers()) as [only], keeping(tmp_path, only.url) as running:
        running.http.post(f"{running.admin}/keys", json={"name": "alice", "key": "k-alice"})
        file = tmp_path / "gateway.toml"
        file.write_text(file.read_text() + '[[keys]]\nname = "alice"\nkey = "other"\n')
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: any("the same name `alice`" in line for line in running.said))
        assert (status_of(running, "k-alice"), status_of(running, "other")) == (200, 401)


@needs_redis
def test_gateways_that_share_redis_share_keys(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    shared = f'[redis]\nurl = "{redis.url}"\n'
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    try:
        with upstreams(answers(output=800)) as [only], running_pair(tmp_path, only.url, shared) as (one, two):
            keys = f"{one.admin}/keys"
            key = one.http.post(keys, json={"name": "made", "budget": 0.001}).json()["key"]
            wait_for(lambda: status_of(two, key) != 401)
            assert {status_of(one, key), status_of(two, key)} >= {429}, "the budget is one of both"
            one.http.post(f"{keys}/made/block")
            wait_for(lambda: status_of(two, key) == 401)
    finally:
        redis.stop()


@contextmanager
def running_pair(folder: Path, url: str, more: str) -> Iterator[tuple[RunningGateway, RunningGateway]]:
    top = f'state_dir = "{folder}/state"\nadmin_key = "boss"\n{more}{PRICED}[[workers]]\nurl = "{url}"\n'
    with gateway(top, folder=folder / "one") as one, gateway(top, folder=folder / "two") as two:
        for each in (one, two):
            each.http.headers["authorization"] = "Bearer boss"
        yield one, two


def test_a_folder_is_of_one_gateway_unless_limits_are_shared(tmp_path: Path) -> None:
    first = StateFolder(str(tmp_path / "state"), is_shared=False)
    with pytest.raises(BadRequest, match="another gateway uses"):
        StateFolder(str(tmp_path / "state"), is_shared=False)
    first.close()
    StateFolder(str(tmp_path / "state"), is_shared=False).close()


def test_gateways_that_make_keys_at_once_lose_none(tmp_path: Path) -> None:
    folders = [StateFolder(str(tmp_path / "state"), is_shared=True) for _ in range(4)]

    def make(number: int) -> None:
        made = GatewayKey(name=f"k{number}", sha256=f"{number:064x}")
        folders[number % 4].change(lambda keys: [*keys, made])

    with ThreadPoolExecutor(4) as pool:
        for first in range(0, 40, 4):
            list(pool.map(make, range(first, first + 4)))
    assert all(folder.read_changed() or len(folder.keys) == 40 for folder in folders)
    assert {key.name for key in folders[0].keys} == {f"k{number}" for number in range(40)}
    for folder in folders:
        folder.close()


def test_a_file_that_is_no_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(BadRequest, match=r"cannot read .*keys\.json"):
        StateFolder(str(tmp_path), is_shared=False)


def test_keys_that_cannot_be_written_are_not_made(tmp_path: Path) -> None:
    folder = StateFolder(str(tmp_path / "state"), is_shared=False)
    (tmp_path / "state" / "keys.new").mkdir()
    with pytest.raises(StateLost, match="cannot write"):
        folder.change(lambda keys: [*keys, GatewayKey(name="a", sha256="0" * 64)])
    assert folder.keys == []
    folder.close()


def test_what_comes_late_does_not_replace_what_was_written_last(tmp_path: Path) -> None:
    """A thread that writes every second may begin when the gateway has ended."""
    folder = StateFolder(str(tmp_path), is_shared=False)
    folder.write_spent({"a": ("2026-11", 2)})
    folder.close()
    folder.write_spent({"a": ("2026-11", 1)})
    again = StateFolder(str(tmp_path), is_shared=False)
    assert again.read_spent() == {"a": ("2026-11", 2)}
    again.close()

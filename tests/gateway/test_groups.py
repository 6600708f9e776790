"""Keys of a group share limits and a budget, beside those of their own."""

from pathlib import Path

import pytest

from gateway.gateways import RunningGateway, answers, gateway, upstreams, wait_for
from gateway.redis_server import RedisServer, needs_redis
from quire.core.errors import BadRequest
from quire.gateway.config_file import parse_config

KEYS = "".join(f'[[keys]]\nname = "{name}"\nkey = "k-{name}"\ngroup = "team"\n' for name in ("a", "b"))
ALONE = '[[keys]]\nname = "c"\nkey = "k-c"\n'
GROUP_LINE = 'group = "team"\n'
PRICED = "[models.m]\nprice = {output = 1.0}\n"


def status_of(running: RunningGateway, name: str) -> int:
    return running.chat(headers={"authorization": f"Bearer k-{name}"}).status_code


def config(url: str, group: str, more: str = "") -> str:
    return f'{more}{PRICED}{KEYS}{ALONE}[[groups]]\nname = "team"\n{group}\n[[workers]]\nurl = "{url}"\n'


def test_what_one_key_spends_is_missing_to_the_other(tmp_path: Path) -> None:
    with upstreams(answers(output=800)) as [only], gateway(config(only.url, "budget = 0.001"), folder=tmp_path) as run:
        assert [status_of(run, name) for name in ("a", "b", "a", "c")] == [200, 200, 429, 200]
        refused = run.chat(headers={"authorization": "Bearer k-b"})
        assert "`group team` has spent its monthly budget of 0.001" in refused.text
        [group] = run.http.get(f"{run.admin}/groups").json()["groups"]
        assert (group["name"], group["spent"], group["budget_left"]) == ("team", 0.0016, 0.0)
        assert run.metric("budget_left", 'tenant="group team"') == 0


def test_requests_of_a_group_are_counted_together(tmp_path: Path) -> None:
    limit = "requests_per_minute = 2"
    with upstreams(answers()) as [only], gateway(config(only.url, limit), folder=tmp_path) as running:
        assert [status_of(running, name) for name in ("a", "b", "a", "b", "c")] == [200, 200, 429, 429, 200]


def test_a_group_says_which_models_its_keys_may_ask_for(tmp_path: Path) -> None:
    with upstreams(answers()) as [only], gateway(config(only.url, 'models = ["other"]'), folder=tmp_path) as running:
        assert [status_of(running, name) for name in ("a", "c")] == [403, 200]


def test_what_a_group_spent_is_known_after_a_restart(tmp_path: Path) -> None:
    state = f'state_dir = "{tmp_path}/state"\n'
    with upstreams(answers(output=800)) as [only]:
        text = config(only.url, "budget = 0.001", state)
        with gateway(text, folder=tmp_path) as running:
            assert status_of(running, "a") == 200
        with gateway(text, folder=tmp_path) as running:
            assert [status_of(running, name) for name in ("b", "b")] == [200, 429]


@needs_redis
def test_gateways_with_one_redis_share_the_budget_of_a_group(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    try:
        with upstreams(answers(output=800)) as [only]:
            text = config(only.url, "budget = 0.001", "").replace(PRICED, f'{PRICED}[redis]\nurl = "{redis.url}"\n')
            with gateway(text, folder=tmp_path / "one") as one, gateway(text, folder=tmp_path / "two") as two:
                assert status_of(one, "a") == 200
                wait_for(lambda: status_of(two, "b") == 200)  # until then `a` is booked with the most it can cost
                wait_for(lambda: status_of(one, "b") == 429)
                assert (status_of(two, "a"), status_of(two, "c")) == (429, 200)
    finally:
        redis.stop()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('[[keys]]\nname = "a"\nkey = "k"\ngroup = "taem"\n[[groups]]\nname = "team"', "did you mean `team`?"),
        ('[[keys]]\nname = "a"\nkey = "k"\ngroup = "team"', "there is none of that name: write [[groups]]"),
        ('[[groups]]\nname = "team"\n[[groups]]\nname = "team"', "two groups are called team"),
        ('[[groups]]\nname = "team"\nbudgte = 1', "did you mean `budget`?"),
    ],
)
def test_a_group_that_cannot_be_is_refused(lines: str, problem: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_config(f"{lines}\n".encode(), "gateway.toml")
    assert problem in f"{raised.value.message}; {raised.value.hint}"


def test_a_request_that_the_group_refuses_is_not_counted_for_its_key(tmp_path: Path) -> None:
    text = f"{PRICED}{KEYS.replace(GROUP_LINE, GROUP_LINE + 'budget = 0.002' + chr(10))}"
    text += '[[groups]]\nname = "team"\nbudget = 0.0001\n'
    with (
        upstreams(answers(output=800)) as [only],
        gateway(f'{text}[[workers]]\nurl = "{only.url}"\n', folder=tmp_path) as running,
    ):
        assert [status_of(running, "a") for _ in range(5)] == [200, 429, 429, 429, 429]
        keys = {each["name"]: each for each in running.http.get(f"{running.admin}/keys").json()["keys"]}
        assert (keys["a"]["spent"], keys["a"]["budget_left"], keys["a"]["in_flight"]) == (0.0008, 0.0012, 0)
        assert running.metric("tenant_requests_in_flight") == 0

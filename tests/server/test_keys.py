"""Keys, and what each of them may use."""

import asyncio
import hashlib
import json
import threading
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from quire.client.one_model import OneModel
from quire.core.errors import BadRequest
from quire.server.access.keys import KeyRing
from quire.server.access.quota import Quota, QuotaLimits
from quire.server.app import create_app
from quire.server.errors import OverQuota
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions
from server.fake_service import FakeService
from server.running import Running, running
from server.test_leaving import eventually

TOML = """
[[keys]]
name = "alice"
key = "one"
requests_per_minute = 2

[[keys]]
name = "bob"
sha256 = "{digest}"
tokens_per_minute = 30
tokens_per_day = 100000
priority = 5

[[keys]]
name = "carol"
key = "three"
max_concurrency = 1
models = ["other"]
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(TOML.format(digest=hashlib.sha256(b"two").hexdigest()))
    return file


def use(server: Running, key: str) -> None:
    server.http.headers["authorization"] = f"Bearer {key}"


def test_each_key_has_a_name_and_limits(keys_file: Path) -> None:
    with running(ServerOptions(api_key=["zero"], keys_file=str(keys_file))) as server:
        assert server.complete().status_code == 401
        use(server, "zero")
        assert server.complete(priority=-3).status_code == 200
        assert server.service.seen[-1].tenant == "key-0" and server.service.seen[-1].priority == -3
        use(server, "one")
        first, second, third = (server.complete() for _ in range(3))
        assert server.service.seen[-1].tenant == "alice" and server.http.get("/v1/models").status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert second.headers["x-ratelimit-reset-requests"] in ("60s", "1m0s", "59.9s")
        assert third.status_code == 429 and 25 <= int(third.headers["retry-after"]) <= 30
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        assert "2 requests a minute" in third.json()["error"]["message"]


def test_tokens_are_charged_when_they_are_known(keys_file: Path) -> None:
    with running(ServerOptions(keys_file=str(keys_file))) as server:
        use(server, "two")
        assert server.complete(prompt="Hello", max_tokens=4, priority=-9).status_code == 200
        seen = server.service.seen[-1]
        assert seen.tenant == "bob" and seen.priority == 5, "who asks may only step back"
        assert server.complete(max_tokens=1, priority=2).headers["x-ratelimit-remaining-tokens"] == "13"
        assert server.service.seen[-1].priority == 7
        stream = server.complete(stream=True, max_tokens=20)  # more than is left: known only at its end
        assert stream.status_code == 200 and "[DONE]" in stream.text
        refused = server.complete()
        assert refused.status_code == 429 and "30 tokens a minute" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        told = 'quire_tenant_tokens_total{kind="output",tenant="bob"} 25.0'
        eventually(lambda: told in server.http.get("/metrics").text)


def test_models_and_concurrency(keys_file: Path) -> None:
    with running(ServerOptions(keys_file=str(keys_file))) as server:
        use(server, "three")
        for body in ({}, {"model": "fake"}):
            refused = server.complete(**body)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_allowed"
        assert server.http.get("/v1/models").json()["data"] == []
        assert not server.service.seen


def test_one_request_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "k", "max_concurrency": 1}]}))
    with running(ServerOptions(keys_file=str(file))) as server:
        use(server, "k")
        hanging = httpx.Client(base_url=server.url, headers=server.http.headers)
        body = {"prompt": "!hang", "stream": True}
        with hanging, hanging.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: when it goes, the connection goes
            next(lines)
            assert server.complete().status_code == 429
        eventually(lambda: not server.service.open)
        eventually(lambda: server.complete().status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sees_the_end_may_send_its_next_request(tmp_path: Path, stream: bool) -> None:
    """The next request comes while the end of the last is being sent."""
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "k", "max_concurrency": 1, "tokens_per_day": 20}]}))
    app = create_app(OneModel(FakeService()), ServerOptions(keys_file=str(file)), Metrics())
    statuses: list[int] = []

    async def ask(again: int) -> None:
        body = iter([json.dumps({"prompt": "Hello", "max_tokens": 8, "stream": stream}).encode()])
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b""}
        scope |= {"headers": [(b"authorization", b"Bearer k"), (b"content-type", b"application/json")]}

        async def receive() -> Message:
            if (part := next(body, None)) is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": part, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif not message.get("more_body") and again:
                await ask(again - 1)

        await app(scope, receive, send)

    asyncio.run(ask(2))
    assert statuses == [200, 200, 429], "13 tokens each, of 20"


def test_what_goes_on_in_the_background_counts(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "k", "max_concurrency": 1}]}))
    with running(ServerOptions(keys_file=str(file))) as server:
        use(server, "k")
        body = {"model": "fake", "input": "!hang", "background": True}
        begun = server.http.post("/v1/responses", json=body).json()["id"]
        assert server.complete().status_code == 429
        [stream] = server.service.open.values()
        stream._closed.set()  # as if it came to its end
        eventually(lambda: server.complete().status_code == 200)
        assert server.http.get(f"/v1/responses/{begun}").json()["status"] != "in_progress"


def test_anthropics_header_is_a_key_too(keys_file: Path) -> None:
    ring = KeyRing([], str(keys_file))
    for headers in ({"x-api-key": "two"}, {"authorization": "Bearer two"}, {"authorization": "bearer  two"}):
        found = ring.find(Headers(headers))
        assert found is not None and found.name == "bob"
    assert KeyRing().find(Headers()) is None, "without keys it is open to all"


def test_a_file_is_read_again_and_what_was_used_stays_used(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing([], str(keys_file))
    alice = ring.find(Headers({"x-api-key": "one"}))
    assert alice is not None
    for _ in range(2):
        alice.quota.enter()
    keys_file.write_text(keys_file.read_text().replace('"three"', '"four"'))
    ring.reload()
    assert ring.find(Headers({"x-api-key": "four"}))
    again = ring.find(Headers({"x-api-key": "one"}))
    assert again is not None
    with pytest.raises(OverQuota):
        again.quota.enter()
    keys_file.write_text("nonsense")
    ring.reload()
    assert "keys were not reloaded" in caplog.text and ring.find(Headers({"x-api-key": "four"}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"keys": [{"name": "a"}]}', "`a` has to have one of key and sha256"),
        ('{"keys": [{"name": "a", "key": "x", "request_per_minute": 3}]}', "unknown field `request_per_minute`"),
        ('{"keys": [{"name": "a", "key": "x", "tokens_per_day": 0}]}', "Expected `int` >= 1"),
        ('{"keys": [{"name": "a", "key": "x"}, {"name": "a", "key": "y"}]}', "the same name `a`"),
        ('{"keys": [{"name": "a", "key": "x"}, {"name": "b", "key": "x"}]}', "the same key$"),
        ('{"keys": [{"name": "a\\n", "key": "x"}]}', "matching regex"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(BadRequest, match=problem):
        KeyRing([], str(file))


def test_a_missing_file_is_told() -> None:
    with pytest.raises(BadRequest, match=r"cannot read /nowhere/keys.json: No such file"):
        KeyRing([], "/nowhere/keys.json")


def test_buckets_fill_up_and_debts_are_paid_first() -> None:
    now = [0.0]
    quota = Quota("a", QuotaLimits(requests_per_minute=60, tokens_per_minute=600), clock=lambda: now[0])
    quota.enter()
    quota.charge(700)  # 100 more than there was
    with pytest.raises(OverQuota) as refused:
        quota.enter()
    assert refused.value.retry_after == 11  # 10 tokens a second
    assert quota.headers()["x-ratelimit-reset-tokens"] == "1m10s"
    now[0] = 11.0
    quota.enter()
    assert quota.running == 2
    now[0] = 1000.0
    assert quota.headers()["x-ratelimit-remaining-requests"] == "60", "a bucket holds no more than its limit"


def test_a_key_is_charged_from_many_threads_of_clients(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "k", "requests_per_minute": 5}]}))
    with running(ServerOptions(keys_file=str(file))) as server:
        use(server, "k")
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(server.complete(max_tokens=1).status_code))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 5 + [429] * 7

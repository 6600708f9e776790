"""Who may ask how much: keys, limits, budgets, shares, queues; and what the audit log says."""

import hashlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gateways import Asked, RunningGateway, Upstream, answers, gateway, response, streams, upstreams, wait_for
from quire.core.fairness import VirtualCounters
from quire.gateway.config import GatewayKey, TokenPrices
from quire.gateway.ledger import UNIT, Budget, OverBudget, cost
from quire.gateway.tenants import Tenants
from quire.gateway.usage import TokenUsage, read_usage
from quire.server.errors import OverQuota

# ---- shares


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=200),
    st.sampled_from([1.0, 0.5, 2.0, 7.0]),
    st.sampled_from([1.0, 3.0]),
)
def test_two_backlogged_tenants_get_their_shares(
    sizes: list[tuple[int, int]], weight_a: float, weight_b: float
) -> None:
    """Whatever the requests are, service by weight differs by at most twice the largest request."""
    counters, served = VirtualCounters(), {"a": 0.0, "b": 0.0}
    weights = {"a": weight_a, "b": weight_b}
    counters.arrives("a", ())
    counters.arrives("b", {"a"})
    largest = 0.0
    for size_a, size_b in sizes:
        sizes_now = {"a": size_a, "b": size_b}
        tenant = counters.next(("a", "b"))[0]
        counters.serve(tenant, sizes_now[tenant], weights[tenant])
        served[tenant] += sizes_now[tenant] / weights[tenant]
        largest = max(largest, size_a / weight_a, size_b / weight_b)
        assert abs(served["a"] - served["b"]) <= 2 * largest


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=200), st.integers(1, 8))
def test_shares_hold_when_what_was_expected_is_wrong(requests: list[tuple[int, int]], slots: int) -> None:
    """`slots` requests run at a time; what one took is known when it ends. What has ended differs by at most twice the
    largest request, and by what runs."""
    counters, served = VirtualCounters(), {"a": 0.0, "b": 0.0}
    counters.arrives("a", ())
    counters.arrives("b", {"a"})
    running: list[tuple[str, int, int]] = []
    largest = max(max(each) for each in requests)
    for expected, took in requests:
        if len(running) == slots:
            tenant, was_expected, took_then = running.pop(0)
            counters.correct(tenant, took_then - was_expected, 1.0)
            served[tenant] += took_then
        tenant = counters.next(("a", "b"))[0]
        counters.serve(tenant, expected, 1.0)
        running.append((tenant, expected, took))
        assert abs(served["a"] - served["b"]) <= (2 + slots) * largest


def test_a_pause_is_no_saving() -> None:
    counters = VirtualCounters()
    counters.arrives("busy", ())
    for _ in range(100):
        counters.serve("busy", 10, 1)
    counters.arrives("back", {"busy"})
    turns = []
    for _ in range(20):
        tenant = counters.next(("busy", "back"))[0]
        counters.serve(tenant, 10, 1)
        turns.append(tenant)
    assert Counter(turns) == {"busy": 10, "back": 10}


# ---- budgets


def test_costs_are_exact() -> None:
    prices = TokenPrices(prompt=0.15, cached=0.075, output=0.6)
    assert cost(TokenUsage(1_000_000, 0, 0), prices) == round(0.15 * UNIT)
    assert cost(TokenUsage(1_000_000, 400_000, 500_000), prices) == round((0.09 + 0.03 + 0.3) * UNIT)
    assert cost(TokenUsage(10, 10, 0), TokenPrices(prompt=1.0)) == 10_000
    assert cost(TokenUsage(5, 0, 5), None) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100), st.integers(0, 100)), max_size=200), st.integers(1, 500))
def test_a_budget_is_passed_by_one_request_at_most(steps: list[tuple[bool, int, int]], limit: int) -> None:
    budget = Budget("t", limit, clock=lambda: 0.0)
    running: list[tuple[int, int]] = []
    largest = max((reserved for _, reserved, _ in steps), default=0)
    for begins, reserved, share in steps:
        if begins or not running:
            try:
                budget.reserve(reserved)
                running.append((reserved, reserved * share // 100))
            except OverBudget as error:
                assert budget.spent + budget.reserved >= limit
                assert (budget.spent >= limit) == ("has spent" in error.message)
        else:
            budget.settle(*running.pop(0))
        assert budget.reserved == sum(reserved for reserved, _ in running)
        assert budget.spent + budget.reserved < limit + largest
    for each in running:
        budget.settle(*each)
    assert budget.reserved == 0 and budget.spent < limit + largest


def test_a_month_begins_anew() -> None:
    now = [1_700_000_000.0]  # 2023-11-14
    budget = Budget("t", 100, clock=lambda: now[0])
    budget.reserve(100)
    budget.settle(100, 100)
    with pytest.raises(OverBudget) as raised:
        budget.reserve(1)
    assert raised.value.retry_after == 16 * 86400 + 6400
    now[0] += raised.value.retry_after
    budget.reserve(1)
    assert budget.left == 100


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 4}}, (9, 0, 4)),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}, (9, 8, 0)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 6}}, (9, 6, 4)),
        ({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}, (5, 0, 1)),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 2}}}, (5, 0, 2)),
        ({"done": True, "prompt_eval_count": 5, "eval_count": 7, "message": {"content": "x"}}, (5, 0, 7)),
        ({"response": "text", "prompt_eval_count": 5, "eval_count": 7}, (5, 0, 7)),
        ({"content": "", "tokens_evaluated": 5, "tokens_predicted": 6}, (5, 0, 6)),
        ({"generated_text": "", "details": {"generated_tokens": 3, "prefill": []}}, (0, 0, 3)),
        ({"message": {"tool_calls": [{"arguments": {"usage": {"prompt_tokens": 1}}}]}}, None),
        ({"choices": []}, None),
        ({"usage": None}, None),
        ({"usage": {"prompt_tokens": "many"}}, None),
    ],
)
def test_usage_is_read_in_every_dialect(body: object, usage: tuple[int, int, int] | None) -> None:
    read = read_usage(json.dumps(body).encode())
    assert (read and (read.prompt, read.cached, read.output)) == usage


def test_limits_that_are_changed_forget_nothing_that_was_used() -> None:
    """A new limit began full, and requests in flight were not counted any more."""
    tenants = Tenants([GatewayKey(name="k", key="x", tokens_per_day=1000, max_concurrency=2)])
    quota = tenants.all()[0].quota
    quota.enter()
    quota.charge(1100)
    tenants.update([GatewayKey(name="k", key="x", tokens_per_day=1050, max_concurrency=2)])
    later = tenants.all()[0].quota
    with pytest.raises(OverQuota, match="1050 tokens a day"):
        later.enter()
    tenants.update([GatewayKey(name="k", key="x", tokens_per_day=1200, max_concurrency=1)])
    with pytest.raises(OverQuota, match="1 requests in flight, and may have 1"):
        tenants.all()[0].quota.enter()
    quota.running -= 1
    tenants.all()[0].quota.enter()


# ---- with a running gateway

KEYS = """
policy = "round_robin"
audit_log = "{folder}/audit.jsonl"
[queue]
max_requests = 4
max_seconds = 2
[models.m]
price = {{prompt = 1000.0, output = 1000.0}}
[[keys]]
name = "free"
key = "free-secret"
[[keys]]
name = "hashed"
sha256 = "{sha256}"
models = ["other"]
routes = ["/v1/chat/completions"]
[[keys]]
name = "lorist"
key = "lorist-secret"
models = ["other"]
[[keys]]
name = "slow"
key = "slow-secret"
requests_per_minute = 2
max_concurrency = 3
[[keys]]
name = "tokens"
key = "tokens-secret"
tokens_per_minute = 20
[[keys]]
name = "poor"
key = "poor-secret"
monthly_budget = 0.02
[[keys]]
name = "heavy"
key = "heavy-secret"
weight = 3.0
[[keys]]
name = "first"
key = "first-secret"
priority = -1
[[workers]]
url = "{url}"
name = "w"
max_in_flight = 1
api_key = "worker-secret"
"""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, Upstream, Path]]:
    folder = tmp_path_factory.mktemp("keyed")
    sha256 = hashlib.sha256(b"hashed-secret").hexdigest()
    with (
        upstreams(answers()) as [only],
        gateway(KEYS.format(folder=folder, sha256=sha256, url=only.url), folder=folder) as running,
    ):
        yield running, only, folder


Keyed = tuple[RunningGateway, Upstream, Path]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-secret"}


def test_keys_are_needed_and_stay_at_the_gateway(keyed: Keyed) -> None:
    running, only, _ = keyed
    assert running.chat().status_code == 401
    assert running.chat(headers={"authorization": "Bearer free-secreT"}).json()["error"]["code"] == "invalid_api_key"
    assert running.http.get(f"{running.url}/v1/models").status_code == 401
    assert running.http.get(f"{running.url}/health").status_code == 200
    assert running.chat(headers=bearer("free")).status_code == 200
    assert running.chat(headers={"x-api-key": "free-secret"}).status_code == 200
    sent = only.asked[-1]
    assert dict(sent.headers)["authorization"] == "Bearer worker-secret" and b"free-secret" not in sent.head


def test_a_key_may_use_its_models_and_routes_only(keyed: Keyed) -> None:
    running, _, _ = keyed
    refused = running.chat(headers=bearer("hashed"))
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_allowed"
    for more in ({"text": "Hi", "lora_path": "m"}, {"inputs": "Hi", "parameters": {"adapter_id": "m"}}):
        adapter = running.http.post(
            f"{running.url}/generate", json={"model": "other", **more}, headers=bearer("lorist")
        )
        assert adapter.json()["error"]["code"] == "model_not_allowed"
    path = running.http.post(f"{running.url}/v1/completions", json={"model": "other"}, headers=bearer("hashed"))
    assert path.status_code == 403 and path.json()["error"]["code"] == "not_allowed"
    assert running.http.get(f"{running.url}/v1/models", headers=bearer("hashed")).json()["data"] == []


def test_requests_and_concurrency_are_limited_and_n_counts(keyed: Keyed) -> None:
    running, _, _ = keyed
    too_many = running.chat(n=4, headers=bearer("slow"))
    assert too_many.status_code == 400 and "4 completions" in too_many.json()["error"]["message"]
    first = running.chat(n=3, headers=bearer("slow"))
    assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "1"
    assert running.chat(headers=bearer("slow")).status_code == 200
    third = running.chat(headers=bearer("slow"))
    assert third.status_code == 429 and 1 <= int(third.headers["retry-after"]) <= 30
    assert third.json()["error"]["code"] == "rate_limit_exceeded"


def test_tokens_are_counted_also_in_streams_that_say_nothing(keyed: Keyed) -> None:
    running, only, _ = keyed
    only.script = streams("a", "b", "c")
    answer = running.chat(stream=True, headers=bearer("tokens"))
    assert '"usage"' not in answer.text, "the gateway asked for it, not the client"
    assert only.asked[-1].json["stream_options"] == {"include_usage": True}
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    assert running.chat(headers=bearer("tokens"), **asked).text.count("usage") == 1
    refused = running.chat(headers=bearer("tokens"))
    only.script = answers()
    assert refused.status_code == 429, "7 + 3 tokens, twice, are its 20"
    assert running.metric("tokens_total", 'tenant="tokens"', 'kind="output"') == 6


def test_a_budget_ends(keyed: Keyed) -> None:
    running, only, _ = keyed
    only.script = answers(prompt=8, output=4)  # 0.012 each
    spent = [running.chat(max_tokens=4, headers=bearer("poor")).status_code for _ in range(3)]
    only.script = answers()
    assert spent == [200, 200, 429]
    refused = running.chat(max_tokens=4, headers=bearer("poor"))
    assert refused.json()["error"]["code"] == "budget_exceeded" and int(refused.headers["retry-after"]) > 1
    assert running.metric("budget_left", 'tenant="poor"') == 0
    assert running.metric("cost_total", 'tenant="poor"') == pytest.approx(0.024)


def test_waiting_requests_are_served_by_priority_and_share(keyed: Keyed) -> None:
    """The worker takes one at a time. Four wait, a fifth is refused with the reason."""
    running, only, _ = keyed
    begun, go, order = threading.Event(), threading.Event(), []

    def script(connection: socket.socket, asked: Asked) -> bool:
        order.append(asked.json["user"])
        begun.set()
        assert go.wait(20)
        connection.sendall(response(b'{"usage": {"prompt_tokens": 20, "completion_tokens": 1}}'))
        return True

    only.script = script
    with ThreadPoolExecutor(8) as pool:

        def ask(tenant: str, user: str) -> None:
            waits.append(pool.submit(running.chat, user=user, max_tokens=1, headers=bearer(tenant)))
            wait_for(lambda: running.metric("queue_requests") == len(waits) - 1)

        waits: list[object] = []
        ask("free", "running")
        assert begun.wait(20)
        ask("free", "free 1")
        ask("free", "free 2")
        ask("heavy", "heavy 1")
        ask("first", "first 1")
        full = running.chat(headers=bearer("free"))
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full" and full.headers["retry-after"]
        go.set()
        assert all(wait.result().status_code == 200 for wait in waits)  # type: ignore[attr-defined]
    only.script = answers()
    assert order[:2] == ["running", "first 1"] and order.index("heavy 1") < order.index("free 2")


def test_a_request_waits_no_longer_than_it_may(keyed: Keyed) -> None:
    running, only, _ = keyed
    go = threading.Event()

    def script(connection: socket.socket, asked: Asked) -> bool:
        assert go.wait(20)
        connection.sendall(response(b"{}"))
        return True

    only.script = script
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(running.chat, headers=bearer("free"))
        wait_for(lambda: running.workers()["w"]["in_flight"] == 1)
        late = running.chat(headers={**bearer("free"), "x-request-timeout": "0.2"})
        assert late.status_code == 429 and "0.2 s" in late.json()["error"]["message"]
        go.set()
        first.result()
    only.script = answers()
    assert running.chat(headers={**bearer("free"), "x-request-timeout": "soon"}).status_code == 400


def test_a_client_that_leaves_the_queue_is_forgotten(keyed: Keyed) -> None:
    running, only, _ = keyed
    go = threading.Event()

    def script(connection: socket.socket, asked: Asked) -> bool:
        assert go.wait(20)
        connection.sendall(response(b"{}"))
        return True

    only.script = script
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.chat, headers=bearer("free"))
        wait_for(lambda: running.workers()["w"]["in_flight"] == 1)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer free-secret\r\n"
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(head + b'Content-Length: 14\r\n\r\n{"model": "m"}')
            wait_for(lambda: running.metric("queue_requests") == 1)
        wait_for(lambda: running.metric("queue_requests") == 0)
        go.set()
        first.result()
    only.script = answers()
    assert running.metric("tenant_requests_in_flight") == 0


def test_the_audit_log_has_decisions_and_no_secrets(keyed: Keyed) -> None:
    running, _, folder = keyed
    running.chat(content="a private matter", headers={**bearer("free"), "x-request-id": "audited"})
    wait_for(lambda: '"audited"' in (folder / "audit.jsonl").read_text())  # a line is written once its answer is sent
    text = (folder / "audit.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    [line] = [line for line in lines if line.get("request") == "audited"]
    assert line["decision"] == "served" and line["tenant"] == "free" and line["worker"] == "w" and line["status"] == 200
    assert line["prompt_tokens"] == 5 and line["output_tokens"] == 2 and line["cost"] == pytest.approx(0.007)
    assert {"served", "refused"} <= {line["decision"] for line in lines}
    said = "".join(running.said)
    for secret in ("-secret", "private matter"):
        assert secret not in text and secret not in said


def test_the_admin_listener_needs_its_key(tmp_path: Path) -> None:
    with gateway('admin_key = "admin-secret"\n[[workers]]\nurl = "http://127.0.0.1:9"\n', folder=tmp_path) as running:
        assert running.http.get(f"{running.admin}/workers").status_code == 401
        answer = running.http.get(f"{running.admin}/workers", headers={"authorization": "Bearer admin-secret"})
        assert answer.json()["workers"][0]["state"] == "unhealthy"
        assert running.http.post(f"{running.url}/workers", json={}).status_code == 404

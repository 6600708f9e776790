"""What a request holds of its tenant's budget while it runs."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.gateways import Asked, answers, gateway, upstreams
from quire.core.errors import BadRequest
from quire.gateway.budget_periods import BudgetPeriod
from quire.gateway.config_file import parse_config
from quire.gateway.ledger import Budget, OverBudget
from quire.gateway.request_facts import read_facts

KEY = {"authorization": "Bearer k-secret"}


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 1, "max_completion_tokens": 4000}])
def test_a_request_that_may_take_a_whole_context_holds_what_that_costs(limits: dict[str, int], tmp_path: Path) -> None:
    """Several at once that each took more than was reserved would pass the budget by all of them."""
    begun, go = threading.Event(), threading.Event()

    def slowly(connection: socket.socket, asked: Asked) -> bool:
        begun.set()
        go.wait(20)
        return answers(prompt=8, output=800)(connection, asked)

    config = '[models.m]\nprice = {output = 1.0}\n[[keys]]\nname = "k"\nkey = "k-secret"\nmonthly_budget = 0.001\n'
    with (
        upstreams(slowly) as [only],
        gateway(f'{config}[[workers]]\nurl = "{only.url}"\n', folder=tmp_path) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(running.chat, headers=KEY, **limits)
        assert begun.wait(20)
        refused = running.chat(headers=KEY, **limits)
        go.set()
        assert first.result().status_code == 200
        assert refused.status_code == 429 and "requests in flight hold the rest" in refused.text
        assert [running.chat(headers=KEY).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    ("body", "prompt", "output"),
    [
        (b'{"max_tokens": 7}', 17, 7),
        (b'{"max_tokens": 7, "n": 3}', 25, 21),
        (b'{"prompt": ["a", "b"], "max_tokens": 7}', 39, 14),
        (b'{"n": 2}', 8, 200),
        (b'{"max_tokens": 1, "max_completion_tokens": 9}', 45, 9),
        (b'{"options": {"num_predict": -1}}', 32, 100),
        (b'{"options": {"seed": 1}, "parameters": {"max_new_tokens": 9}}', 61, 9),
        (b'{"previous_response_id": "r", "max_output_tokens": 5}', 153, 5),
    ],
)
def test_what_a_request_can_take(body: bytes, prompt: int, output: int) -> None:
    most = read_facts("/v1/completions", body).at_most(100, len(body))
    assert (most.prompt, most.output) == (prompt, output)


@pytest.mark.parametrize(
    ("period", "label", "end"),
    [
        ("hour", "2026-12-31T22", "2026-12-31T23:00"),
        ("day", "2026-12-31", "2027-01-01T00:00"),
        ("week", "2026-12-28", "2027-01-04T00:00"),
        ("month", "2026-12", "2027-01-01T00:00"),
    ],
)
def test_a_budget_begins_anew_with_its_period(period: BudgetPeriod, label: str, end: str) -> None:
    now = [datetime(2026, 12, 31, 22, 30, tzinfo=UTC).timestamp()]
    budget = Budget("t", 100, lambda: now[0], period)
    budget.reserve(100)
    budget.settle(100, 100)
    with pytest.raises(OverBudget, match="has spent its") as raised:
        budget.reserve(1)
    assert budget.label == label
    now[0] += raised.value.retry_after or 0
    assert now[0] == datetime.fromisoformat(f"{end}+00:00").timestamp()
    assert budget.left == 100 and budget.label > label


def test_a_budget_for_all_time_is_not_waited_for() -> None:
    budget = Budget("t", 100, lambda: 0.0, "total")
    budget.settle(0, 100)
    with pytest.raises(OverBudget, match="has spent its budget of 1e-07") as raised:
        budget.reserve(1)
    assert raised.value.retry_after is None and "raise it" in (raised.value.hint or "")


def test_another_period_of_a_budget_begins_with_nothing_spent() -> None:
    budget = Budget("t", 100, lambda: 0.0, "day")
    budget.settle(0, 60)
    budget.change(200, "day")
    assert budget.left == 140
    budget.change(100, "total")
    assert budget.left == 100


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('budget_period = "fortnight"', "it is one of hour, day, week, month, total"),
        ("budget = 1.0\nmonthly_budget = 2.0", "`k` has monthly_budget beside budget"),
        ('monthly_budget = 2.0\nbudget_period = "day"', "write budget and budget_period"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(lines: str, problem: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_config(f'[[keys]]\nname = "k"\nkey = "x"\n{lines}\n'.encode(), "gateway.toml")
    assert problem in f"{raised.value.message}; {raised.value.hint}"

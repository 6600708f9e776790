"""What a request holds of its tenant's budget while it runs."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.gateways import Asked, answers, gateway, upstreams
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

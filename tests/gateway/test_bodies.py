"""What the gateway reads of a body: whatever a client sends, a request is understood or refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.gateways import RunningGateway, Upstream, answers, gateway, upstreams
from quire.core.errors import BadRequest
from quire.gateway.request_facts import MAX_COUNT, read_facts, with_fields

PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/responses",
    "/api/chat",
    "/api/show",
    "/v2/models/x/infer",
]
NAMES = [
    *("model", "Model", "name", "stream", "n", "best_of", "max_tokens", "num_predict", "priority", "user"),
    *("prompt", "messages", "options", "parameters", "tools", "cache_salt", "previous_response_id"),
    *("text", "input_ids", "sampling_params"),
]
HUGE = "1" + "0" * 5000
RAW = ["-1", "1.5", "1e400", HUGE, str(2**63), str(2**64), '"\\ud800"', '"\\u0000"', "[[]]", "{}", "null", "[1, 2]"]
VALUES = st.one_of(
    st.sampled_from(RAW), st.integers().map(str), st.text(max_size=8).map(json.dumps), st.booleans().map(json.dumps)
)
NESTED = st.lists(VALUES, max_size=3).map(lambda values: f"[{','.join(values)}]")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), st.lists(st.tuples(st.sampled_from(NAMES), st.one_of(VALUES, NESTED)), max_size=6))
def test_every_body_is_understood_or_refused(path: str, members: list[tuple[str, str]]) -> None:
    body = "{" + ",".join(f'"{name}":{value}' for name, value in members) + "}"
    try:
        facts = read_facts(path, body.encode())
    except BadRequest as error:
        assert error.message
    else:
        assert 0 <= facts.output_tokens <= MAX_COUNT**3 and facts.prompt_tokens >= 1
        facts.cache_salt.encode()
        json.loads(with_fields(facts, {"model": "other"})) if HUGE not in body else None


CONFIG = """
default_model = "m"
[[keys]]
name = "some"
key = "some-secret"
models = ["m"]
monthly_budget = 1.0
[models.m]
price = {prompt = 1.0, output = 1.0}
"""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, Upstream]]:
    folder: Path = tmp_path_factory.mktemp("bodies")
    with (
        upstreams(answers()) as [only],
        gateway(CONFIG + f'[[workers]]\nurl = "{only.url}"\nname = "w"\n', folder=folder) as running,
    ):
        yield running, only


def post(running: RunningGateway, body: str) -> httpx.Response:
    headers = {"authorization": "Bearer some-secret", "content-type": "application/json"}
    return running.http.post(f"{running.url}/v1/chat/completions", content=body.encode(), headers=headers)


@pytest.mark.parametrize("field", ["max_tokens", "n", "priority", "user", "cache_salt"])
def test_a_number_beyond_64_bits_is_no_internal_error(keyed: tuple[RunningGateway, Upstream], field: str) -> None:
    refused = post(keyed[0], f'{{"model": "m", "{field}": {HUGE}}}')
    assert refused.status_code == 400 and f"`{field}` cannot be read" in refused.json()["error"]["message"]


def test_half_a_surrogate_pair_is_no_internal_error(keyed: tuple[RunningGateway, Upstream]) -> None:
    assert post(keyed[0], '{"model": "\\ud800"}').status_code == 400


def test_a_limit_of_any_size_holds_no_more_than_the_budget_can_bear(keyed: tuple[RunningGateway, Upstream]) -> None:
    running, _ = keyed
    assert post(running, '{"model": "m", "max_tokens": 9000000000000000000}').status_code == 200
    assert post(running, '{"model": "m"}').status_code == 200


def test_a_key_for_some_models_may_leave_out_the_default_one(keyed: tuple[RunningGateway, Upstream]) -> None:
    assert post(keyed[0], '{"messages": []}').status_code == 200


def test_a_second_spelling_of_model_does_not_get_past_the_rules_of_a_key(
    keyed: tuple[RunningGateway, Upstream],
) -> None:
    """Go's decoder takes `Model` for `model`."""
    running, only = keyed
    num_asked = len(only.asked)
    assert post(running, '{"model": "m", "Model": "forbidden"}').status_code == 400
    assert post(running, '{"mod\\u0065l": "forbidden"}').status_code == 403
    assert len(only.asked) == num_asked

"""Schemathesis over /openapi.json: what it allows is served or refused, never failed, and answered as it says.

The server is a real one; its model is tiny, so that hundreds of requests take seconds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from clients.served import started
from trials import rounds

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MODEL = "tiny"
REQUIRED = {"messages", "prompt", "input", "inputs", "tokens", "query", "documents", "text_1", "text_2", "max_tokens"}
NEVER_ENDS = "/live"
EXAMPLES = rounds(6)  # of each operation, the same in every run


@pytest.fixture(scope="module")
def address(tiny_model: Path) -> Iterator[str]:
    with started(str(tiny_model), "--served-model-name", MODEL) as address:
        yield address


def test_the_description_is_whole(address: str) -> None:
    description = schemathesis.openapi.from_url(f"{address}/openapi.json")
    description.validate()
    for path, operations in description.raw_schema["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"]["200"]["content"], f"{method} {path}: what is answered?"
            bodiless = path.endswith(("/cancel", "/reset_prefix_cache", "/flush_cache", "/sleep", "/wake_up"))
            assert method != "post" or "requestBody" in operation or bodiless, f"{path}: what is read?"


@pytest.mark.slow
@pytest.mark.trial
def test_nothing_fails_and_all_is_as_described(address: str) -> None:
    description = schemathesis.openapi.from_url(f"{address}/openapi.json").exclude(path=NEVER_ENDS)
    operations = [found.ok() for found in description.get_all_operations()]
    assert len(operations) > 35
    problems = []
    for operation in operations:
        try:
            ask_many(operation)
        except (Exception, BaseExceptionGroup) as problem:
            problems.append(f"{operation.label}: {problem}")
    assert not problems, "\n\n".join(problems)


def few(body: dict[str, Any], data: strategies.DataObject) -> dict[str, Any]:
    """Some of the fields, so that most of what is asked is not refused for one of many; and the model that is there."""
    optional = sorted(body.keys() - REQUIRED)
    kept = data.draw(strategies.sets(strategies.sampled_from(optional), max_size=3)) if optional else set()
    return {**{name: value for name, value in body.items() if name in kept | REQUIRED}, "model": MODEL}


def ask_many(operation: Any) -> None:
    statuses = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(), data=strategies.data())
    def ask(case: schemathesis.Case, data: strategies.DataObject) -> None:
        if isinstance(case.body, dict):
            case.body = few(case.body, data)
        response = case.call(timeout=30)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    assert statuses

"""Clients that hold back what others need. They live in an environment of their own, .venv-clients, which stands on
.venv-dev; `make test` runs these tests there, and elsewhere they are not collected."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from clients.served import served

collect_ignore_glob = [] if find_spec("lm_eval") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # they are the clients' own


@pytest.fixture(scope="session")
def address(default_model: Path) -> str:
    return served()

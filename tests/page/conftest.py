"""One browser and one server for all tests of the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from page.browser import Browser, browser
from page.serving import Served, served
from quire.server.options import ServerOptions


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[Served]:
    with served(default_model) as server:
        yield server


@pytest.fixture(scope="session")
def locked(default_model: Path) -> Iterator[Served]:
    """A server that wants a key."""
    with served(default_model, ServerOptions(api_key=["open sesame"])) as server:
        yield server

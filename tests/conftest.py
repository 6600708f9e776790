"""Fixtures shared by all tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched on first use."""
    from quire.engine.sources import resolve_model

    return resolve_model("smollm2").path

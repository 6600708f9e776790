"""`QUIRE_TEST_DEVICE=cuda python -m pytest tests/models`: every family on a GPU beside transformers, and nothing else.

In Triton's interpreter, for a family or two: `QUIRE_TEST_DEVICE=cpu python -m pytest tests/models -k arcee`. By two
ranks, or two stages, on the CPU: `QUIRE_TEST_DEVICE=ranks` or `stages`."""

import os
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore = []
if not find_spec("gguf"):  # which these write files with
    collect_ignore += ["test_codebook_types.py", "test_gguf_families.py", "test_gguf_older.py", "test_lora.py"]
if not find_spec("quire._native"):  # where only a GPU is tried out
    collect_ignore += ["test_default_model.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("QUIRE_TEST_DEVICE"):
        return
    kept = [item for item in items if _backend(item) in ("gpu", "ranks", "stages")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _backend(item: pytest.Item) -> Any:
    return item.callspec.params.get("backend") if hasattr(item, "callspec") else None

"""Where an engine computes, by what the process can see."""

from pathlib import Path

import pytest

from quire.core.errors import Unsupported
from quire.engine import start


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and torch."""
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(start, "find_spec", lambda name: name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_gpu_that_is_hidden_is_not_used(driver: None, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    assert start.uses_gpu("auto") and start.uses_gpu("cuda") and not start.uses_gpu("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not start.uses_gpu("auto")
    with pytest.raises(Unsupported, match="CUDA_VISIBLE_DEVICES hides all GPUs"):
        start.uses_gpu("cuda")


def test_one_of_several_gpus_is_visible(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert start.uses_gpu("auto")

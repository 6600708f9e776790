"""The examples of docs/clients.md run."""

from pathlib import Path

import pytest

from clients import examples


@pytest.mark.parametrize("title", examples.THERE)
def test_an_example(title: str, default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples.run(title)
    assert capsys.readouterr().out.strip()

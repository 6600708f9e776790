"""The examples of docs/clients.md run."""

from pathlib import Path

import pytest

from clients import examples


def test_there_is_something_to_check() -> None:
    assert len(examples.HERE) == 5 and len(examples.THERE) == 2


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("title", examples.HERE)
def test_an_example(title: str, default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples.run(title)
    assert capsys.readouterr().out.strip()

"""A plain Llama to quantize."""

from pathlib import Path

import pytest

from quantize.plain_models import write_plain


@pytest.fixture(scope="session")
def plain_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain-llama")
    write_plain(folder)
    return folder

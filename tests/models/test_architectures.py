"""The page that compares architectures with those of other engines."""

import pytest

from models.architectures import LLAMA_CPP, PAGE, TRANSFORMERS, VLLM, loaded, page, read
from quire.core.errors import Unsupported
from quire.models.missing import MISSING
from quire.models.registry import purpose
from quire.weights.gguf.missing import MISSING_GGUF


def test_the_page_is_that_of_the_registries() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.models.architectures`"


def test_all_that_is_not_loaded_says_what_is_missing() -> None:
    assert [name for name in [*VLLM, *TRANSFORMERS] if loaded(name) is None and name not in MISSING] == []
    assert [name for name in LLAMA_CPP if read(name) is None and name not in MISSING_GGUF] == []


def test_nothing_that_is_loaded_says_that_something_is_missing() -> None:
    assert [name for name in MISSING if loaded(name)] == []


@pytest.mark.parametrize("name", [name for name in VLLM if loaded(name) is None][:1])
def test_an_error_says_what_is_missing(name: str) -> None:
    with pytest.raises(Unsupported, match=f"`{name}` is not supported; what is missing: {MISSING[name]}"):
        purpose(name)

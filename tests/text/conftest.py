"""The default model's tokenizer, and a compiler of grammars for it."""

from pathlib import Path

import pytest

from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer

VOCAB = 49152


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB)

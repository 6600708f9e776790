"""Token ids that random prompts are made of, and texts that have as many tokens."""

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.hub import cached_models, resolve_model

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

UNKNOWN_VOCABULARY = range(1000, 30_000)  # ids that vocabularies of today have, behind the special tokens
NUM_WORDS = 2000
# One token each in most vocabularies.
_WORDS = (
    "the of and to in is was for on that with as by at from it be this have or an had not are but which their "
    "one all were when we there been has more who will would time only about other into could two may then do "
    "first any my now such like our over man me even most made after also did many before must through back "
    "years where much your way well down should because each just those people too little state good very make "
    "world still own see men work long here get both between life being under never day same another know "
    "while last might us great old year off come since against go came right used take three"
)
COMMON_WORDS = _WORDS.split()


class PromptTokens:
    """Maps any number to a token of the vocabulary, and to a word of one token: equal numbers to equal ones."""

    def __init__(self, tokenizer: "Tokenizer | None" = None) -> None:
        self.tokenizer = tokenizer
        self._ids: Sequence[int] = UNKNOWN_VOCABULARY
        if tokenizer is not None:
            special = set(tokenizer.special_ids)
            self._ids = [token for token in range(tokenizer.vocab_size) if token not in special]

    @cached_property
    def _words(self) -> Sequence[str]:
        found = _words(self.tokenizer, self._ids) if self.tokenizer else []
        return found or [f" {word}" for word in COMMON_WORDS]

    def ids(self, numbers: Sequence[int]) -> list[int]:
        count = len(self._ids)
        return [self._ids[_scattered(number) % count] for number in numbers]

    def text(self, numbers: Sequence[int]) -> str:
        count = len(self._words)
        return "".join(self._words[_scattered(number) % count] for number in numbers)

    def count(self, text: str) -> int | None:
        return None if self.tokenizer is None else len(self.tokenizer.encode(text, add_special_tokens=False))


def _scattered(number: int) -> int:
    """Neighbours go far apart (Fibonacci hashing)."""
    return (number * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 32


def _words(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    """Tokens that stay apart from what stands before them: a space and letters; else single characters."""
    words: list[str] = []
    characters: list[str] = []
    for token in random.Random(0).sample(ids, len(ids)):
        text = tokenizer.decode([token])
        is_word = text[:1] == " " and text[1:].isascii() and text[1:].isalpha()
        if (is_word or (len(text) == 1 and text.isascii() and text.isalnum())) and tokenizer.encode(
            text, add_special_tokens=False
        ) == [token]:
            (words if is_word else characters).append(text)
        if len(words) == NUM_WORDS:
            break
    return words if len(words) >= len(COMMON_WORDS) else characters


def find_tokenizer(given: str | None, model: str | None) -> "Tokenizer | None":
    """The one that is named; else that of the model, if its files are on this machine."""
    from quire.text.tokenizers.tokenizer import Tokenizer

    if given is not None:
        return Tokenizer.load(Path(given) if Path(given).exists() else resolve_model(given).path)
    if model is None:
        return None
    paths = {cached.name: cached.path for cached in cached_models()}
    path = Path(model) if Path(model).exists() else paths.get(model)
    try:
        return None if path is None else Tokenizer.load(path)
    except (QuireError, OSError, ValueError):
        return None  # a file of the same name is not the model

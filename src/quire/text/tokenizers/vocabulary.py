"""What the readers of tokenizer files return: huggingface.py, sentencepiece.py and gguf.py."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from quire.core.errors import BadCheckpoint
from quire.text.tokenizers.longest_match import LongestMatch
from quire.text.tokenizers.piece_backends import MarianBackend, SentencePieceBPE
from quire.text.tokenizers.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer as its files describe it."""

    backend: tokenizers.Tokenizer | SentencePieceBPE | MarianBackend | LongestMatch
    token_bytes: TokenBytes  # for tokens that are not in `added`
    strips_space: bool  # encoding adds a space before the text, and decoding removes it
    added: Mapping[int, str]  # tokens that are matched before the others, by their literal text
    special_ids: frozenset[int]  # the added tokens that are not text
    prefix: list[int] = field(default_factory=list)  # special tokens before a text, and after it
    suffix: list[int] = field(default_factory=list)
    eos_ids: list[int] = field(default_factory=list)
    named: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, unk_token, pad_token: their texts
    chat_template: str | None = None


@contextmanager
def refuse_damaged(problem: str) -> Iterator[None]:
    """Turns any error of the `tokenizers` library, while it builds a tokenizer, into BadCheckpoint. Its errors have no
    class of their own, and its Rust panics are not even an `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise BadCheckpoint(f"{problem}: {error}") from error

"""The tokenizer of a checkpoint as its readers hand it over: huggingface.py, sentencepiece.py, gguf.py."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from quire.core.errors import BadCheckpoint
from quire.text.tokenizers.piece_backends import MarianBackend, SentencePieceBPE
from quire.text.tokenizers.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a reader of a tokenizer's files finds out."""

    backend: tokenizers.Tokenizer | SentencePieceBPE | MarianBackend
    token_bytes: TokenBytes  # of tokens that are not in `added`
    strips_space: bool  # encoding puts a space before a text, which decoding takes away again
    added: Mapping[int, str]  # tokens matched in a text before anything else; their text is as it stands
    special_ids: frozenset[int]  # of those, the ones that are no text
    prefix: list[int] = field(default_factory=list)  # ids that special tokens put before a text, and after it
    suffix: list[int] = field(default_factory=list)
    eos_ids: list[int] = field(default_factory=list)
    named: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, unk_token, pad_token: their texts
    chat_template: str | None = None


@contextmanager
def refuse_damaged(problem: str) -> Iterator[None]:
    """Around the library while it builds a tokenizer. Its errors have no class of their own, and some are panics of its
    Rust, which are no `Exception`: a file that it cannot take is damaged, whatever it says."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise BadCheckpoint(f"{problem}: {error}") from error

"""A stream of ids as a stream of text."""

from codecs import getincrementaldecoder
from collections.abc import Iterable

from quire.text.tokenizers.tokenizer import Tokenizer

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """The pieces that push() and flush() return, joined, are `decode()` of the prompt and the pushed ids, less
    `decode()` of the prompt. A character is returned when its last byte has come. Work for a token is constant."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids_tail: Iterable[int] = ()
    ) -> None:
        """`prompt_ids_tail`: the prompt's last tokens, reaching back at least to one that is not special; it may be all
        of it. After them a word's leading space is kept, and a character that they began is finished."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._at_start = tokenizer.strips_space  # a space that comes now was put there by the encoder
        self.push(prompt_ids_tail)

    def push(self, ids: Iterable[int]) -> str:
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._decode(b"".join([token_bytes(token) for token in ids if token not in skipped]), final=False)

    def flush(self) -> str:
        """The end: what is left of an unfinished character, as U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._at_start and text:
            self._at_start = False
            return text[1:] if text.startswith(" ") else text
        return text

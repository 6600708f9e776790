"""Incremental detokenization: a stream of ids becomes a stream of text."""

from codecs import BufferedIncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from typing import cast

from quire.text.tokenizers.tokenizer import Tokenizer

_Utf8Decoder = cast(type[BufferedIncrementalDecoder], getincrementaldecoder("utf-8"))  # `buffer`: a part of a character


class Detokenizer:
    """The joined results of push() and flush() are `decode()` of prompt and pushed ids, without `decode()` of the
    prompt. A character is returned with its last byte. The work per token is constant."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids_tail: Sequence[int] = ()
    ) -> None:
        """`prompt_ids_tail`: the prompt's last tokens, at least one of them not special, or all of them. After them a
        word keeps its leading space, and a character that they begin is completed."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._whole_texts = tokenizer.whole_texts[skip_special_tokens]
        self._at_start = tokenizer.strips_space  # the encoder has put a space before the text
        self.push(prompt_ids_tail)

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._at_start and not self._decoder.buffer:
            text = self._whole_texts[ids[0]]
            if text is not None:
                return text
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._decode(b"".join([token_bytes(token) for token in ids if token not in skipped]), final=False)

    def flush(self) -> str:
        """The end: an incomplete character becomes U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._at_start and text:
            self._at_start = False
            return text[1:] if text.startswith(" ") else text
        return text

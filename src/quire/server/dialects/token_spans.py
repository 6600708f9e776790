"""Which characters of a text each token covers."""

from typing import TYPE_CHECKING

from msgspec import Struct

from quire.core.errors import BadRequest

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

MAX_CHARACTERS = 1 << 20  # of a text to tokenize, whose tokens take a hundred times as many bytes


class TokenSpan(Struct):
    id: int
    text: str
    start: int  # in characters; a token that is part of a character covers all of it
    stop: int


def checked_text(text: str) -> str:
    """Raises BadRequest for a text that takes too long to tokenize."""
    if len(text) > MAX_CHARACTERS:
        raise BadRequest(
            f"the text has {len(text)} characters, and {MAX_CHARACTERS} are allowed", "send it in parts", param="prompt"
        )
    return text


def token_spans(tokenizer: "Tokenizer", ids: list[int], text: str) -> list[TokenSpan]:
    data = text.encode()
    spans, end = [], -int(tokenizer.strips_space)  # the encoder put a space before the text
    num_begun = 0  # characters whose first byte was covered
    for token in ids:
        begin, end = max(end, 0), end + len(tokenizer.token_bytes(token))
        covered = data[begin : max(end, 0)]
        start = num_begun - (not _begins_character(covered[0])) if covered else len(text)
        num_begun += sum(map(_begins_character, covered))
        stop = num_begun if covered else len(text)
        spans.append(TokenSpan(token, text[start:stop], start, stop))
    return spans


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80

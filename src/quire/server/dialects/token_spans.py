"""Which characters of a text each token covers."""

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


class TokenSpan(Struct):
    id: int
    text: str
    start: int  # in characters; a token that is part of a character covers all of it
    stop: int


def token_spans(tokenizer: "Tokenizer", ids: list[int], text: str) -> list[TokenSpan]:
    character_of = [index for index, character in enumerate(text) for _ in character.encode()]  # byte -> character
    spans, end = [], -int(tokenizer.strips_space)  # the encoder put a space before the text
    for token in ids:
        begin, end = max(end, 0), end + len(tokenizer.token_bytes(token))
        covered = character_of[begin : max(end, 0)]
        start, stop = (covered[0], covered[-1] + 1) if covered else (len(text), len(text))
        spans.append(TokenSpan(token, text[start:stop], start, stop))
    return spans

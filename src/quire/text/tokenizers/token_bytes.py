"""Which bytes a token stands for. A vocabulary is text, and there are three ways of writing bytes in it."""

import re
from collections.abc import Callable

TokenBytes = Callable[[str], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others for U+0100 and onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """GPT-2's way: one letter a byte. A token with other letters is plain text."""
    try:
        return bytes([_BYTE_OF[letter] for letter in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """SentencePiece's way: text with U+2581 for a space, and <0x0A> for a byte that no piece covers."""
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def wordpiece(token: str) -> bytes:
    """BERT's way: words stand apart, and a piece that goes on with one begins with ##. Where the spaces of a text were
    is not kept: around punctuation there are more of them than before."""
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()

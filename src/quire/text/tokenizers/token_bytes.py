"""The bytes of a token. Vocabularies are text, and encode bytes in one of three ways."""

import re
from collections.abc import Callable

TokenBytes = Callable[[str], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable bytes stand for themselves, the others are U+0100 and onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def byte_level(token: str) -> bytes:
    """GPT-2: one character for each byte. A token with other characters is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def byte_level_text(data: bytes) -> str:
    """The bytes in GPT-2's characters."""
    return "".join([_CHARACTER_OF[byte] for byte in data])


def sentencepiece(token: str) -> bytes:
    """SentencePiece: text with U+2581 for a space, and <0x0A> for a byte that no piece covers."""
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def wordpiece(token: str) -> bytes:
    """BERT: a token starts a new word unless it begins with ##. The spaces of the text are lost, so decoding adds
    spaces around punctuation."""
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()

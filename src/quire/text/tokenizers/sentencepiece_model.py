"""A file of SentencePiece (`tokenizer.model`, `source.spm`): the pieces, and what is done to a text before.

It is a protocol buffer, of which a few fields are read here: a field is a number and a wire type, then a varint, eight
or four bytes, or a length and so many bytes."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import BadCheckpoint, Unsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
_MODELS = {1: "unigram", 2: "bpe"}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    model: str  # "unigram" or "bpe"
    characters: bytes  # a table of what characters are replaced by; empty: none are
    space_first: bool  # a text begins with a space, whether it has one or not
    single_spaces: bool  # of many spaces one is left, and none at the ends

    def of(self, *kinds: int) -> list[int]:
        """The ids of pieces of these kinds."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    try:
        return _read(path)
    except (ValueError, IndexError, struct.error) as error:
        raise BadCheckpoint(f"{path} is no file of SentencePiece, or damaged: {error}") from error


def _read(path: Path) -> SentencePieceModel:
    pieces, scores, kinds = [], [], []
    trainer, normalizer = b"", b""
    for number, value in _fields(path.read_bytes()):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            pieces.append(_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            kinds.append(int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = _bytes(value)
        elif number == 3:
            normalizer = _bytes(value)
    if not pieces:
        raise ValueError("it has no pieces")
    kind = int(dict(_fields(trainer)).get(3, 1))
    if kind not in _MODELS:
        raise Unsupported(f"{path} is SentencePiece's model {kind}", "supported: unigram (1), BPE (2)")
    rules = dict(_fields(normalizer))
    return SentencePieceModel(
        pieces,
        scores,
        kinds,
        model=_MODELS[kind],
        characters=_bytes(rules.get(2, b"")),
        space_first=bool(rules.get(3, 1)),
        single_spaces=bool(rules.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number of every field, and its value."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind not in (_EIGHT, _BYTES, _FOUR):
            raise ValueError(f"a field of the wire type {kind}")
        size = 8 if kind == _EIGHT else 4
        if kind == _BYTES:
            size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes, and {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """-> the number, and where the next one begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value

"""Reads a SentencePiece model file (`tokenizer.model`, `source.spm`): the pieces, and the normalization of texts.

The file is a protocol buffer. A field is a number and a wire type, then a varint, eight or four bytes, or a length and
that many bytes."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import BadCheckpoint, Unsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
_ALGORITHMS = {1: "unigram", 2: "bpe"}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    algorithm: str  # "unigram" or "bpe"
    char_map: bytes  # a compiled table of character replacements; may be empty
    add_space: bool  # before every text
    collapse_spaces: bool  # runs of spaces to one, and none at the ends

    def of(self, *kinds: int) -> list[int]:
        """The ids of pieces of these types."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    try:
        return _read(path)
    except (ValueError, IndexError, struct.error) as error:
        raise BadCheckpoint(f"{path} is not a SentencePiece model, or damaged: {error}") from error


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
    model_type = int(dict(_fields(trainer)).get(3, 1))
    if model_type not in _ALGORITHMS:
        raise Unsupported(f"{path} has SentencePiece model type {model_type}", "supported: unigram (1), BPE (2)")
    rules = dict(_fields(normalizer))
    return SentencePieceModel(
        pieces,
        scores,
        kinds,
        algorithm=_ALGORITHMS[model_type],
        char_map=_bytes(rules.get(2, b"")),
        add_space=bool(rules.get(3, 1)),
        collapse_spaces=bool(rules.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, offset = _varint(data, offset)
            yield number, value
            continue
        if wire_type not in (_EIGHT, _BYTES, _FOUR):
            raise ValueError(f"a field of the wire type {wire_type}")
        size = 8 if wire_type == _EIGHT else 4
        if wire_type == _BYTES:
            size, offset = _varint(data, offset)
        if offset + size > len(data):
            raise ValueError(f"a field of {size} bytes, and {len(data) - offset} are left")
        yield number, data[offset : offset + size]
        offset += size


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """The number, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value

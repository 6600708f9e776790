"""Backends for SentencePiece vocabularies, with the methods of a `tokenizers.Tokenizer` that `Tokenizer` needs.

SentencePiece's BPE runs in C++ on pieces and scores. The `tokenizers` library would need every split of a piece in two
as a merge: half a million for Gemma, which take two seconds to build."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers

SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class PieceEncoding:
    ids: list[int]


class SentencePieceBPE:
    """BPE by scores. `mergeable`: whether a piece may result from a merge. `added`: ids that are matched before the
    others, by their literal text."""

    def __init__(
        self,
        pieces: list[str],
        scores: list[float],
        mergeable: Sequence[bool],
        added: list[int],
        unknown: int | None,
        add_space: bool,
    ) -> None:
        from quire import _native  # here: a directory with a tokenizer.json needs no compiled module

        byte_pieces = {pieces[index]: index for index in range(len(pieces)) if len(pieces[index]) == 6}
        byte_ids = [byte_pieces.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        unknown = -1 if unknown is None else unknown
        prefix = SPACE if add_space else ""
        self._pieces = _native.SentencePieces(pieces, scores, bytes(mergeable), added, byte_ids, unknown, prefix)

    def encode(self, text: str, add_special_tokens: bool) -> PieceEncoding:
        assert not add_special_tokens, "the tokenizer adds special tokens itself"
        return PieceEncoding(self._pieces.encode(text.encode()))

    def get_vocab_size(self) -> int:
        return len(self._pieces)

    def token_to_id(self, token: str) -> int | None:
        token_id: int = self._pieces.id(token)
        return None if token_id < 0 else token_id

    def id_to_token(self, token: int) -> str | None:
        return self._pieces.piece(token) if 0 <= token < len(self._pieces) else None


class MarianBackend:
    """Encodes with the source vocabulary and decodes with the target vocabulary; both may be the same."""

    def __init__(
        self, source: tokenizers.Tokenizer, ids: Mapping[str, int], targets: Mapping[str, int], unknown: str
    ) -> None:
        self._source, self._ids, self._unknown = source, ids, ids[unknown]
        self._pieces = {token: piece for piece, token in targets.items()}

    def encode(self, text: str, add_special_tokens: bool) -> PieceEncoding:
        assert not add_special_tokens, "the tokenizer adds special tokens itself"
        pieces = []
        if text.startswith(">>") and (end := text.find("<<") + 2) > 1:  # the target language
            pieces, text = [text[:end]], text[end:]
        pieces += self._source.encode(text, add_special_tokens=False).tokens
        return PieceEncoding([self._ids.get(piece, self._unknown) for piece in pieces])

    def get_vocab_size(self) -> int:
        return len(self._pieces)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token: int) -> str | None:
        return self._pieces.get(token)

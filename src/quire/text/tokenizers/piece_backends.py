"""SentencePiece's BPE, in C++: the part of a `tokenizers.Tokenizer` that a vocabulary of pieces and scores needs.

The library would want every way of cutting a piece in two as a merge, half a million of them for Gemma, which take two
seconds to make; here the scores are enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers

SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class PieceEncoding:
    ids: list[int]


class SentencePieceBPE:
    """`joined`: whether a piece may be made of others. `first`: ids found in a text before anything else."""

    def __init__(
        self,
        pieces: list[str],
        scores: list[float],
        joined: Sequence[bool],
        first: list[int],
        unknown: int | None,
        space_first: bool,
    ) -> None:
        from quire import _native  # here: what is not built is not asked for

        known = {pieces[index]: index for index in range(len(pieces)) if len(pieces[index]) == 6}
        bytes_ = [known.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        unknown = -1 if unknown is None else unknown
        prefix = SPACE if space_first else ""
        self._pieces = _native.SentencePieces(pieces, scores, bytes(joined), first, bytes_, unknown, prefix)

    def encode(self, text: str, add_special_tokens: bool) -> PieceEncoding:
        assert not add_special_tokens, "what stands around a text is the tokenizer's"
        return PieceEncoding(self._pieces.encode(text.encode()))

    def get_vocab_size(self) -> int:
        return len(self._pieces)

    def token_to_id(self, token: str) -> int | None:
        found: int = self._pieces.id(token)
        return None if found < 0 else found

    def id_to_token(self, token: int) -> str | None:
        return self._pieces.piece(token) if 0 <= token < len(self._pieces) else None


class MarianBackend:
    """Pieces of a source, with the ids of a vocabulary; and pieces of an answer, with those of the same or another."""

    def __init__(
        self, source: tokenizers.Tokenizer, ids: Mapping[str, int], answers: Mapping[str, int], unknown: str
    ) -> None:
        self._source, self._ids, self._unknown = source, ids, ids[unknown]
        self._pieces = {token: piece for piece, token in answers.items()}

    def encode(self, text: str, add_special_tokens: bool) -> PieceEncoding:
        assert not add_special_tokens, "what stands around a text is the tokenizer's"
        pieces = []
        if text.startswith(">>") and (end := text.find("<<") + 2) > 1:  # the language to translate into
            pieces, text = [text[:end]], text[end:]
        pieces += self._source.encode(text, add_special_tokens=False).tokens
        return PieceEncoding([self._ids.get(piece, self._unknown) for piece in pieces])

    def get_vocab_size(self) -> int:
        return len(self._pieces)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token: int) -> str | None:
        return self._pieces.get(token)

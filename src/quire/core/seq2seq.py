"""Encoder-decoders: the encoder's input and the decoder's tokens as one sequence.

A sequence is laid out as the encoder's input, padding up to the end of its last block, and the decoder's tokens from
its start tokens on. The slots of the encoder's input hold its cross-attention keys and values, which every decoder
token reads. The decoder therefore begins at a block boundary, and the blocks of the encoder's input are forked,
swapped, cached and released like those of any prompt. Two things differ: each of these blocks depends on the whole
input, and all of them are computed in one step."""

from dataclasses import dataclass
from hashlib import blake2b

from quire.core.request import Request

PADDING = 0  # the token id between the encoder's input and the decoder's tokens; it is never computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2Seq:
    """The limits and special tokens of an encoder-decoder."""

    start_ids: tuple[int, ...]  # the decoder's first tokens; all but the first count in a beam's length
    max_encoder_tokens: int
    max_decoder_tokens: int  # including start_ids
    forced_eos_id: int | None = None  # the last token of an output that reaches its maximum length
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # the last id of each is never sampled after the ids before it


def num_padding(request: Request, block_size: int) -> int:
    """Slots between the encoder's input and the decoder's tokens; 0 for a decoder-only model."""
    return -len(request.prompt_ids) % block_size if request.start_ids else 0


def lay_out_prompt(request: Request, block_size: int) -> list[int]:
    """All tokens of a sequence that are known before anything is sampled, padding included."""
    return [*request.prompt_ids, *[PADDING] * num_padding(request, block_size), *request.start_ids]


def encoder_digest(encoder_ids: list[int]) -> str:
    """Part of the cache namespace: equal blocks of different encoder inputs hold different keys and values."""
    return blake2b(b"".join(token.to_bytes(4, "little") for token in encoder_ids), digest_size=16).hexdigest()

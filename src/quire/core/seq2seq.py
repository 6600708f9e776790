"""Models that read a source, whole, before they write an answer: encoder-decoders.

Both are one sequence: the source, empty places up to the end of its last block, and the answer, from its start tokens
on. In the slots of the source lie its keys and values, which every token of the answer attends to. So an answer begins
with a block, and all that holds for the blocks of a prompt holds for those of a source: samples and beams share them,
they are swapped, found again, and given back. What differs: each depends on the whole source, and all are computed in
one step."""

from dataclasses import dataclass
from hashlib import blake2b

from quire.core.request import Request

EMPTY = 0  # stands for a token between a source and its answer, which is never computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2Seq:
    """What is known of such a model."""

    start_ids: tuple[int, ...]  # what answers begin with. All but the first are counted as part of a hypothesis
    max_source: int  # tokens
    max_answer: int  # tokens, start_ids among them
    last_id: int | None = None  # what an answer ends with that its length ends
    banned: tuple[tuple[int, ...], ...] = ()  # sequences of ids whose last id is never drawn after the others


def num_empty(request: Request, block_size: int) -> int:
    return -len(request.prompt_ids) % block_size if request.start_ids else 0


def prompt_of(request: Request, block_size: int) -> list[int]:
    """All that is known of a sequence before anything is drawn."""
    return [*request.prompt_ids, *[EMPTY] * num_empty(request, block_size), *request.start_ids]


def digest(source: list[int]) -> str:
    """Blocks of different sources are told apart by it, since a block alone does not tell."""
    return blake2b(b"".join(token.to_bytes(4, "little") for token in source), digest_size=16).hexdigest()

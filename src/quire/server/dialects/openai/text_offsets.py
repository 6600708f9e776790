"""Where the text of each token begins, in characters of the text that a client receives."""

from typing import TYPE_CHECKING

from quire.text.tokenizers.detokenizer import Detokenizer

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


class TextOffsets:
    """Of one choice. A token that is part of a character begins where the character does, and one whose text is not
    shown, such as a special token, where the next one does."""

    def __init__(
        self, tokenizer: "Tokenizer", skip_special_tokens: bool, prompt_ids: list[int], echoed: str = ""
    ) -> None:
        """`echoed`: the text that precedes the completion."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt_ids[-8:])
        self._next = len(echoed)

    def push(self, token_id: int) -> int:
        offset = self._next
        self._next += len(self._detokenizer.push([token_id]))
        return offset


def prompt_offsets(tokenizer: "Tokenizer", ids: list[int], text: str) -> list[int]:
    """Of the tokens of a prompt, whose text this is. Special tokens that were added to it are not in the text."""
    detokenizer, offsets, offset = Detokenizer(tokenizer, skip_special_tokens=False), [], 0
    for token in ids:
        offsets.append(offset)
        piece = detokenizer.push([token])
        if text.startswith(piece, offset):
            offset += len(piece)
    return offsets

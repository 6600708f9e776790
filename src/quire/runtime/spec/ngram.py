"""Prompt lookup: where the last few tokens stood before, what followed there is likely to follow again."""

from collections.abc import Mapping

from quire.ops.compiled import native
from quire.ops.opset import Int32

LOOKED_AT = 1024  # places where the last token stood before, the newest ones: among more there is rarely a longer match


class Ngram:
    """Guesses by the longest match of up to `prompt_lookup_max` tokens, by the newest of several. Nothing is kept from
    step to step."""

    def __init__(self, num_tokens: int, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._num_tokens = num_tokens
        self._least, self._most = prompt_lookup_min, prompt_lookup_max

    def propose(self, known: Mapping[int, Int32]) -> dict[int, list[int]]:
        return {row: found for row, tokens in known.items() if (found := self._guess(tokens))}

    def retire(self, row: int) -> None:
        """There is nothing to forget."""

    def _guess(self, tokens: Int32) -> list[int]:
        begin = native.find_repetition(tokens, self._least, self._most, LOOKED_AT)
        if begin < 0:
            return []
        follows: list[int] = tokens[begin : begin + self._num_tokens].tolist()
        return [follows[i % len(follows)] for i in range(self._num_tokens)]  # what repeats goes on repeating

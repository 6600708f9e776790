"""Prompt lookup (n-gram): what followed the last few tokens where they stood before."""

from collections.abc import Mapping

from quire.ops.compiled import native
from quire.ops.opset import Int32
from quire.runtime.spec.proposer import Proposer, ProposerContext

MAX_CANDIDATES = 1024  # newest occurrences of the last token that are compared: more rarely give a longer match


class Ngram(Proposer):
    """Proposes what followed the longest match of up to `prompt_lookup_max` tokens, the newest of several."""

    def __init__(
        self, context: ProposerContext, num_tokens: int, prompt_lookup_min: int, prompt_lookup_max: int
    ) -> None:
        self._min, self._max = prompt_lookup_min, prompt_lookup_max

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        return {row: drafts for row, tokens in known.items() if (drafts := self._drafts(tokens, counts[row]))}

    def _drafts(self, tokens: Int32, count: int) -> list[int]:
        begin = native.find_repetition(tokens, self._min, self._max, MAX_CANDIDATES)
        if begin < 0:
            return []
        follows: list[int] = tokens[begin : begin + count].tolist()
        return [follows[i % len(follows)] for i in range(count)]  # what repeats goes on repeating

"""DRY's sequence breakers as token ids: which tokens contain a breaker, or begin one that others end.

As in llama.cpp: a token that contains the whole breaker is one; a token that ends with its first characters is one if
the tokens of the others follow."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

from quire.core.dry import DryBreaker
from quire.core.errors import BadRequest
from quire.text.tokenizers.tokenizer import Tokenizer

MAX_CACHED = 64  # breakers
MAX_CACHED_IDS = 8192  # of one breaker; one with more is searched for again


class DryBreakers:
    """Finds the ids of breakers, and remembers the last ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cached: OrderedDict[str, list[DryBreaker]] = OrderedDict()

    def num_new(self, breakers: Sequence[str]) -> int:
        """How many of them the vocabulary has to be searched for, a few milliseconds each."""
        return sum(breaker not in self._cached for breaker in breakers)

    def find(self, breakers: Sequence[str]) -> list[DryBreaker]:
        whole: set[int] = set()  # tokens that are breakers alone
        found: list[DryBreaker] = []
        for breaker in dict.fromkeys(breakers):
            for one in self._find(breaker):
                if one.tail:
                    found.append(one)
                else:
                    whole.update(one.heads)
        if (num_ids := sum(len(one.heads) for one in found)) > self._vocab_size:
            raise BadRequest(
                f"{num_ids} tokens can begin one of the sequence breakers, and {self._vocab_size} are allowed in all",
                "give fewer or shorter ones",
                param="dry_sequence_breakers",
            )
        return [DryBreaker(sorted(whole), []), *found] if whole else found

    def _find(self, breaker: str) -> list[DryBreaker]:
        if (cached := self._cached.get(breaker)) is not None:
            return cached
        found = self._search(breaker)
        if sum(len(one.heads) for one in found) <= MAX_CACHED_IDS:
            self._cached[breaker] = found
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return found

    def _search(self, breaker: str) -> list[DryBreaker]:
        text = breaker.encode()
        whole = {token for token, written in self._tokens if text in written}
        found = [DryBreaker(sorted(whole), [])]
        for split in range(1, len(breaker)):  # between characters: the tail has to be a text
            begin, rest = breaker[:split].encode(), breaker[split:]
            heads = [
                token
                for token, written in self._tokens_by_end.get(begin[-1], ())
                if written.endswith(begin) and token not in whole
            ]
            tail = self._tokenizer.encode(rest, add_special_tokens=False) if heads else []
            if tail:
                found.append(DryBreaker(heads, tail))
        return [one for one in found if one.heads]

    @cached_property
    def _tokens(self) -> list[tuple[int, bytes]]:
        return [(token, self._tokenizer.token_bytes(token)) for token in range(self._vocab_size)]

    @cached_property
    def _tokens_by_end(self) -> dict[int, list[tuple[int, bytes]]]:
        """The tokens of the vocabulary, by their last byte."""
        by_end: dict[int, list[tuple[int, bytes]]] = {}
        for token, written in self._tokens:
            if written:
                by_end.setdefault(written[-1], []).append((token, written))
        return by_end

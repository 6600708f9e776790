"""Remembers the tokens of the parts of a text between special tokens: a conversation that goes on is tokenized once.

Special tokens cut a text before anything else looks at it, so the tokens of a part do not depend on the others."""

import re
from collections import OrderedDict
from threading import Lock

import tokenizers

from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tokenizers.vocabulary import Vocabulary

MAX_CHARACTERS = 16 << 20  # of all parts that are remembered


class SegmentedTokenizer(Tokenizer):
    """A tokenizer with such a memory, where its kind allows it. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._cuts = special_cuts(self._backend)
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._num_characters = 0
        self._lock = Lock()

    def _ids(self, text: str) -> list[int]:
        if self._cuts is None:
            return super()._ids(text)
        ids: list[int] = []
        for place, part in enumerate(self._cuts.split(text)):  # text and special tokens take turns
            if place % 2:
                token = self._backend.token_to_id(part)
                assert token is not None
                ids.append(token)
            elif part:
                ids += self._part(part)
        return ids

    def _part(self, text: str) -> list[int]:
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return known
        ids = super()._ids(text)
        with self._lock:
            if text not in self._known:
                self._known[text] = ids
                self._num_characters += len(text)
            while self._num_characters > MAX_CHARACTERS:
                self._num_characters -= len(self._known.popitem(last=False)[0])
        return ids


def special_cuts(backend: object) -> re.Pattern[str] | None:
    """Matches special tokens; None where parts depend on each other: a space is put before the first part alone, or a
    special token takes in the spaces around it."""
    if not isinstance(backend, tokenizers.Tokenizer):
        return None
    added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    if not added or any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if '"prepend_scheme":"first"' in backend.to_str().replace(" ", ""):
        return None
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

"""The tokens of a model, as llguidance wants to know them."""

from functools import cached_property
from typing import TYPE_CHECKING

from quire.core.errors import Unsupported

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from quire.text.tokenizers.tokenizer import Tokenizer

LONGEST = 32  # bytes of a token that is looked for
REMEMBERED = 4096  # texts whose tokens are known, of at most
REMEMBERED_BYTES = 256  # each


class GrammarTokenizer:
    """Where only one text can follow, it is drawn in the tokens that the tokenizer itself would cut it into."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        """`vocab_size` is the model's: masks have a bit for each of its tokens."""
        self.ends = [token for token in tokenizer.eos_ids if token < vocab_size]
        if not self.ends:
            raise Unsupported("the model has no token that ends a text, and structured output needs one")
        self.eos_token_id = self.ends[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)
        self._known: dict[bytes, list[int]] = {}  # a schema asks for the same few texts in every answer

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {spelling: token for token, spelling in enumerate(self.tokens) if token not in self._special}

    def vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        # Tokens that go together: where a whole slice may follow, or none of it, they are not looked at one by one.
        slices = ["[a-z]+", *LLTokenizer.general_slices()]
        return LLTokenizer(TokenizerWrapper(self), eos_token=self.ends, slices=slices)

    def spelling(self, token: int) -> bytes | None:
        """None: it is none of a text."""
        return None if token in self._special or token in self.ends else self.tokens[token]

    def __call__(self, text: bytes) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._cut(text)
            if len(self._known) == REMEMBERED:
                self._known.clear()
            if len(text) <= REMEMBERED_BYTES:
                self._known[text] = ids
        return ids

    def _cut(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False)
        plain = all(token < len(self.tokens) and token not in self._special for token in ids)
        if plain and b"".join(self.tokens[token] for token in ids) == text:
            return ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """For what the tokenizer does not spell as it stands: SentencePiece puts a space before a text, and a special
        token's name is that token. What no token begins is left out: llguidance goes on byte by byte then."""
        ids: list[int] = []
        while text:
            size = next((size for size in range(min(len(text), LONGEST), 0, -1) if text[:size] in self._by_bytes), 0)
            if not size:
                break
            ids.append(self._by_bytes[text[:size]])
            text = text[size:]
        return ids

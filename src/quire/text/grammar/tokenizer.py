"""The model's tokenizer as llguidance needs it."""

from functools import cached_property
from typing import TYPE_CHECKING

from quire.core.errors import Unsupported

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from quire.text.tokenizers.tokenizer import Tokenizer

MAX_TOKEN_BYTES = 32  # of a token that the greedy tokenization looks for
MAX_CACHED_TEXTS = 4096  # encoded texts
MAX_CACHED_TEXT_BYTES = 256  # of each


class GrammarTokenizer:
    """Text that the grammar forces is encoded as the model's tokenizer would encode it. The attributes `eos_token_id`,
    `bos_token_id`, `tokens`, `special_token_ids` and the call are llguidance's interface."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        """`vocab_size` is the model's: a mask has a bit for each of its tokens."""
        self.eos_ids = [token for token in tokenizer.eos_ids if token < vocab_size]
        if not self.eos_ids:
            raise Unsupported("the model has no eos token, and structured output needs one")
        self.eos_token_id = self.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)
        self._encoded: dict[bytes, list[int]] = {}  # a schema forces the same few texts in every sequence

    @cached_property
    def _id_by_bytes(self) -> dict[bytes, int]:
        return {raw: token for token, raw in enumerate(self.tokens) if token not in self._special}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Special tokens that do not end a text, by their names."""
        names = {token: self.tokens[token].decode(errors="ignore") for token in self.special_token_ids}
        return {name: token for token, name in names.items() if name and token not in self.eos_ids}

    def build(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        # A slice is a set of tokens that a mask takes or leaves as a whole, without looking at each of them.
        slices = ["[a-z]+", *LLTokenizer.general_slices()]
        return LLTokenizer(TokenizerWrapper(self), eos_token=self.eos_ids, slices=slices)

    def text_bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None for special tokens, which are not text."""
        return None if token in self._special or token in self.eos_ids else self.tokens[token]

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encoded.get(text)
        if ids is None:
            ids = self._encode(text)
            if len(self._encoded) == MAX_CACHED_TEXTS:
                self._encoded.clear()
            if len(text) <= MAX_CACHED_TEXT_BYTES:
                self._encoded[text] = ids
        return ids

    def _encode(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False)
        plain = all(token < len(self.tokens) and token not in self._special for token in ids)
        if plain and b"".join(self.tokens[token] for token in ids) == text:
            return ids
        return self._encode_greedily(text)

    def _encode_greedily(self, text: bytes) -> list[int]:
        """The longest token first, for text that the tokenizer does not encode as it stands: SentencePiece adds a
        space before it, and the name of a special token becomes that token. Ends where no token fits: llguidance
        then goes on byte by byte."""
        ids: list[int] = []
        while text:
            sizes = range(min(len(text), MAX_TOKEN_BYTES), 0, -1)
            size = next((size for size in sizes if text[:size] in self._id_by_bytes), 0)
            if not size:
                break
            ids.append(self._id_by_bytes[text[:size]])
            text = text[size:]
        return ids

"""Text to ids and back.

The `tokenizers` library encodes, or a native backend for SentencePiece vocabularies (piece_backends.py). Decoding is
ours: every token stands for certain bytes, and a text is these bytes as UTF-8, with U+FFFD for each ill-formed part. So
logprobs can show a token's exact bytes, and a stream of tokens decodes to the same text as all of them at once (see
detokenizer.py)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quire.core.errors import BadRequest
from quire.text.tokenizers.vocabulary import Vocabulary
from quire.weights.checkpoint import find_checkpoint

LONG_TEXT_CHARACTERS = 2048  # take about a millisecond


class WholeTexts(dict[int, str | None]):
    """Filled in as tokens are looked up."""

    def __init__(self, tokenizer: "Tokenizer", skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer, self._skipped = tokenizer, skipped

    def __missing__(self, token: int) -> str | None:
        text: str | None = ""
        if token not in self._skipped:
            try:
                text = self._tokenizer.token_bytes(token).decode()
            except UnicodeDecodeError:
                text = None
        self[token] = text
        return text


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._bytes: dict[int, bytes] = {token: text.encode() for token, text in vocabulary.added.items()}
        self.vocab_size: int = self._backend.get_vocab_size()
        self.special_ids = vocabulary.special_ids
        self.eos_ids = vocabulary.eos_ids
        self.chat_template = vocabulary.chat_template
        self.special_tokens = vocabulary.named  # by name, for chat templates
        self.strips_space = vocabulary.strips_space
        # By whether special tokens are skipped: token -> its text, or None if that is a part of a character.
        self.whole_texts = {True: WholeTexts(self, self.special_ids), False: WholeTexts(self, frozenset())}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a checkpoint, or from a directory with only the tokenizer's files."""
        path = Path(path)
        source = path if (path / "tokenizer.json").exists() else find_checkpoint(path)
        if source.is_dir():
            from quire.text.tokenizers import huggingface as huggingface_tokenizer

            return cls(huggingface_tokenizer.read_vocabulary(source))
        from quire.text.tokenizers import gguf as gguf_tokenizer

        return cls(gguf_tokenizer.read_vocabulary(source))

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self.id_of(self.bos_token)

    @property
    def bos_token_id(self) -> int | None:
        """The name that scripts written for transformers know."""
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.id_of(self.eos_token)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        """Render messages and tokenize them, as in transformers. `options` are those of `ChatTemplate.render`."""
        if not self.chat_template:
            raise BadRequest("this model has no chat template", "write the prompt out")
        from quire.text.chat.chat_template import ChatTemplate

        template = ChatTemplate(self.chat_template, self.bos_token, self.eos_token)
        text = template.render([dict(message) for message in conversation], add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def id_of(self, token: str) -> int | None:
        """The id of a token, written as in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in the text are always recognized. `add_special_tokens` adds those that the model
        expects around a text, such as a first <s>."""
        with _refuse_surrogates(text):
            ids = self._ids(text)
        if add_special_tokens:
            return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix]
        return list(ids)

    def _ids(self, text: str) -> list[int]:
        if len(text) >= LONG_TEXT_CHARACTERS and isinstance(self._backend, tokenizers.Tokenizer):
            # Only the batch functions of the library release the GIL.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        return self._backend.encode(text, add_special_tokens=False).ids

    def truncate(self, ids: list[int], limit: int) -> list[int]:
        """An encoded text with its special tokens, cut at the end of the text to at most `limit` tokens."""
        suffix = self._vocabulary.suffix
        return ids if len(ids) <= limit else [*ids[: max(limit - len(suffix), 0)], *suffix]

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], list[int]]:
        """The ids and the token type ids (0 or 1) of a pair of texts. With `limit`, at most so many tokens remain: the
        longer text is cut at its end."""
        assert isinstance(self._backend, tokenizers.Tokenizer), "SentencePiece models take no pairs of texts"
        with _refuse_surrogates(first), _refuse_surrogates(second):
            pair = self._backend.encode(first, second, add_special_tokens=True)
        kept = list(range(len(pair.ids)))
        if limit is not None and len(kept) > limit:
            owners = pair.sequence_ids
            texts = [[index for index in kept if owners[index] == text] for text in (0, 1)]
            room = max(limit - sum(owner is None for owner in owners), 0)
            shorter, longer = sorted(map(len, texts))
            shorter = min(shorter, room // 2)
            sizes = (shorter, min(longer, room - shorter))
            small = 0 if len(texts[0]) <= len(texts[1]) else 1
            dropped = {index for text in (0, 1) for index in texts[text][sizes[text != small] :]}
            kept = [index for index in kept if index not in dropped]
        return [pair.ids[index] for index in kept], [pair.type_ids[index] for index in kept]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else ()
        text = b"".join([self.token_bytes(token) for token in ids if token not in skipped]).decode(errors="replace")
        return text[1:] if self.strips_space and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes, which may be a part of a character. Empty for an id that pads the model's vocabulary."""
        cached = self._bytes.get(token)
        if cached is None:
            if not 0 <= token < 1 << 32:
                raise BadRequest(f"{token} is not the id of a token", f"ids are 0 to {self.vocab_size - 1}")
            name = self._backend.id_to_token(token)
            cached = b"" if name is None else self._vocabulary.token_bytes(name)
            self._bytes[token] = cached
        return cached

    def token_name(self, token: int) -> str:
        """The token as the vocabulary writes it: `Ġthe` is ` the` in one of bytes. Empty for an id that pads it."""
        return self._backend.id_to_token(token) or self._vocabulary.added.get(token, "")

    def token_text(self, token: int) -> str:
        """The bytes as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token).decode(errors="replace")


@contextmanager
def _refuse_surrogates(text: str) -> Iterator[None]:
    try:
        yield
    except (UnicodeEncodeError, TypeError) as error:
        if (position := _lone_surrogate(text)) is None:
            raise
        raise BadRequest(f"the text has a lone surrogate at position {position}") from error


def _lone_surrogate(text: str) -> int | None:
    return next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)

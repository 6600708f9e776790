"""Texts become ids for a model that encodes them: the text half of `Embedder`, and of the client."""

from collections.abc import Sequence

from quire.client.embed_request import Text
from quire.client.prompt import check_characters
from quire.core.encode_request import EncodeInput
from quire.core.errors import BadRequest, PromptTooLong
from quire.text.pair_template import encode_by_template, pair_template
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.sentence_modules import SentenceModules

QUERY, DOCUMENT = ("query",), ("document", "passage")  # names that checkpoints give the prompts of both


TRUNCATED_TOKEN_LENGTH = 32  # characters; a text is cut where so many for each token that fits are left


class EncoderPrompter:
    """Tokenizes and checks. What it returns, the model can encode."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        modules: SentenceModules,
        vocab_size: int,
        max_model_len: int,
        asked: bool = False,  # scores are those of a yes or a no that a decoder is asked for
    ) -> None:
        self.tokenizer = tokenizer
        self._template = pair_template(tokenizer, asked or modules.asks)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._modules = modules

    def tokens(self, texts: Sequence[Text], prompt_name: str | None, truncate: bool | int) -> list[EncodeInput]:
        prompt = self._prompt(prompt_name)
        return [self._encode(text, prompt, truncate, place) for place, text in enumerate(texts)]

    def pairs(self, pairs: Sequence[tuple[str, str]], truncate: bool | int) -> list[EncodeInput]:
        """Both texts of each pair, to be encoded together by a cross-encoder."""
        return [self._encode_pair(query, text, truncate, place) for place, (query, text) in enumerate(pairs)]

    def sides(
        self, pairs: Sequence[tuple[str, str]], truncate: bool | int
    ) -> tuple[list[EncodeInput], list[tuple[int, int]]]:
        """For a model that encodes one text at a time: the texts, each once, and for each pair the indices of its
        two."""
        roles = self._named(QUERY), self._named(DOCUMENT)
        indices: dict[tuple[str | None, str], int] = {}
        sides = [
            (indices.setdefault((roles[0], a), len(indices)), indices.setdefault((roles[1], b), len(indices)))
            for a, b in pairs
        ]
        texts = enumerate(indices)
        return [self._encode(text, self._prompt(role), truncate, place) for place, (role, text) in texts], sides

    def _named(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._modules.prompts), None)

    def _prompt(self, name: str | None) -> str:
        name = self._modules.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self._modules.prompts:
            known = ", ".join(self._modules.prompts)
            hint = f"it has {known}" if known else "it has none: put the words before the texts"
            raise BadRequest(f"the checkpoint has no prompt {name!r}", hint, param="prompt_name")
        return self._modules.prompts[name]

    def _encode(self, text: Text, prompt: str, truncate: bool | int, place: int) -> EncodeInput:
        limit = self._limit(truncate)
        if isinstance(text, str):
            ids = self.tokenizer.encode(self._cut(self._normalize(prompt + text), limit))
        else:
            ids = list(text)
        if limit is not None:
            ids = self.tokenizer.truncate(ids, limit)
        self._check(ids, place)
        return EncodeInput(ids)

    def _encode_pair(self, query: str, document: str, truncate: bool | int, place: int) -> EncodeInput:
        limit = self._limit(truncate)
        texts = [self._cut(self._normalize(text), limit) for text in (query, document)]
        if self._template is not None:
            ids = encode_by_template(self.tokenizer, self._template, texts[0], texts[1], limit)
            self._check(ids, place)
            return EncodeInput(ids)
        ids, segments = self.tokenizer.encode_pair(texts[0], texts[1], limit)
        self._check(ids, place)
        return EncodeInput(ids, segments)

    def _limit(self, truncate: bool | int) -> int | None:
        if truncate is False:
            return None
        return self.max_model_len if truncate is True else min(truncate, self.max_model_len)

    def _cut(self, text: str, limit: int | None) -> str:
        """Without what could not fit in any case, so that it need not be tokenized."""
        if limit is not None:
            return text[: TRUNCATED_TOKEN_LENGTH * limit]
        check_characters(text, self.max_model_len, "input")
        return text

    def _normalize(self, text: str) -> str:
        return text.lower() if self._modules.lower else text

    def _check(self, ids: Sequence[int], place: int) -> None:
        if not ids:
            raise BadRequest(f"text {place} has no tokens", "leave it out", param="texts")
        if len(ids) > self.max_model_len:
            raise PromptTooLong(
                f"text {place} has {len(ids)} tokens, and the model takes {self.max_model_len}",
                "cut it into parts, or set truncate to leave out its end",
                param="texts",
            )
        if (unknown := next((token for token in ids if not 0 <= token < self.vocab_size), None)) is not None:
            raise BadRequest(f"text {place} has token id {unknown}, and the vocabulary has {self.vocab_size}")

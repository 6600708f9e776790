"""Renders a conversation to the text of its prompt, without generating."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from quire.client.prompt import check_characters
from quire.core.errors import BadRequest
from quire.text.chat.chat_template import ChatTemplate

if TYPE_CHECKING:
    from quire.client.service import ModelInfo
    from quire.text.tokenizers.tokenizer import Tokenizer

_template = lru_cache(maxsize=8)(ChatTemplate)


class HasTokenizer(Protocol):
    """A service, or the context of a dialect."""

    @property
    def info(self) -> "ModelInfo": ...

    @property
    def tokenizer(self) -> "Tokenizer": ...


def chat_text(tokenizer: "Tokenizer", messages: list[dict[str, Any]], /, **options: Any) -> str:
    """`options` are those of `ChatTemplate.render`. The text includes special tokens."""
    if tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template", "give `prompt`", param="messages")
    return _template(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token).render(messages, **options)


def num_chat_tokens(model: HasTokenizer, messages: list[dict[str, Any]], /, **options: Any) -> int:
    """Prompt tokens of the conversation."""
    return num_text_tokens(model, chat_text(model.tokenizer, messages, **options))


def num_text_tokens(model: HasTokenizer, text: str) -> int:
    """Tokens of a rendered conversation. A text that cannot fit is refused, and not tokenized."""
    check_characters(text, model.info.max_model_len)
    return len(model.tokenizer.encode(text, add_special_tokens=False))

"""Renders a conversation to the text of its prompt, without generating."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest
from quire.text.chat.chat_template import ChatTemplate

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

_template = lru_cache(maxsize=8)(ChatTemplate)


def chat_text(tokenizer: "Tokenizer", messages: list[dict[str, Any]], **options: Any) -> str:
    """`options` are those of `ChatTemplate.render`. The text includes special tokens."""
    if tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template", "give `prompt`", param="messages")
    return _template(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token).render(messages, **options)

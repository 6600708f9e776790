"""The oldest turns of a conversation are left out when it does not fit."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from quire.server.dialects.dialect import Context
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tools.params import ToolParams

Messages = list[dict[str, Any]]

_template = lru_cache(maxsize=8)(ChatTemplate)


def num_tokens(messages: Messages, context: Context, use: ToolParams) -> int:
    """Of the prompt that they become."""
    form, tokenizer = context.chat_format(), context.tokenizer
    template = _template(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    text = template.render(form.messages(messages, use), tools=form.template_tools(use))
    return len(tokenizer.encode(text, add_special_tokens=False))


def newest_that_fit(messages: Messages, size: Callable[[Messages], int], room: int) -> Messages:
    """Whole turns, each beginning with what the user said; the system's messages stay. `size` is in tokens.

    The last turn is left in any case: if it alone is too long, that is an error to be told."""
    if size(messages) <= room:
        return messages
    first = next((at for at, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    system, turns = messages[:first], messages[first:]
    starts = [at for at, message in enumerate(turns) if message["role"] == "user" and at > 0]
    low, high = 0, len(starts) - 1  # the first of the starts from which on it fits is among these
    while low < high:
        middle = (low + high) // 2
        if size(system + turns[starts[middle] :]) <= room:
            high = middle
        else:
            low = middle + 1
    return system + turns[starts[low] :] if starts else messages

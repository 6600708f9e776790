"""Drops the oldest turns of a conversation that does not fit."""

from collections.abc import Callable
from math import inf
from typing import Any

from quire.client.prompt import USUAL_TOKEN_LENGTH
from quire.server.dialects.chat_request import prompt_text
from quire.server.dialects.dialect import Context
from quire.text.tools.params import ToolParams

Messages = list[dict[str, Any]]


def num_tokens(messages: Messages, context: Context, use: ToolParams) -> float:
    """Prompt tokens of the conversation. One that is far too long has infinitely many: it is not tokenized."""
    limit = 2 * USUAL_TOKEN_LENGTH * context.info.max_model_len
    if sum(len(message.get("content") or "") for message in messages) > limit:
        return inf
    text = prompt_text(context, messages, use)
    return inf if len(text) > 2 * limit else len(context.tokenizer.encode(text, add_special_tokens=False))


def newest_that_fit(messages: Messages, size: Callable[[Messages], float], room: int) -> Messages:
    """The newest turns whose `size` is at most `room` tokens. A turn begins with a message of the user; system messages
    stay. The last turn stays in any case: if it alone is too long, submitting it raises an error."""
    if size(messages) <= room:
        return messages
    first = next((index for index, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    system, turns = messages[:first], messages[first:]
    starts = [index for index, message in enumerate(turns) if message["role"] == "user" and index > 0]
    low, high = 0, len(starts) - 1  # binary search for the first start from which it fits
    while low < high:
        middle = (low + high) // 2
        if size(system + turns[starts[middle] :]) <= room:
            high = middle
        else:
            low = middle + 1
    return system + turns[starts[low] :] if starts else messages

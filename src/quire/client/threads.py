"""Work that would hold up the event loop runs in a thread."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LONG_TEXT = 20_000  # characters; a longer text is tokenized in a thread


async def run_in_thread_if(num_characters: int, work: Callable[..., T], *arguments: Any) -> T:
    """work(*arguments), in a thread if the text is long."""
    return await asyncio.to_thread(work, *arguments) if num_characters > LONG_TEXT else work(*arguments)

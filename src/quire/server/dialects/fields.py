"""What the bodies of several dialects share: field types, ids, and refusals of fields that are not supported."""

import time
from collections.abc import Mapping
from typing import Annotated, Any
from uuid import uuid4

from msgspec import Meta, Struct

from quire.core.errors import BadRequest
from quire.server.access.request_context import current_request_context

Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]  # what the engine's arrays hold
Salt = Annotated[str, Meta(max_length=1024)]  # kept with every block of the prefix cache


def refuse_unsupported(body: Struct, table: Mapping[str, tuple[Any, ...]]) -> None:
    """`table`: field -> the values that ask for nothing. Every other value is refused, never ignored."""
    for name, harmless in table.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise BadRequest(f"`{name}` is not supported", "leave it out", param=name)


def new_id(prefix: str, separator: str = "-") -> str:
    """A resumed answer keeps its id."""
    context = current_request_context()
    name = context.resumption.id if context and context.resumption else uuid4().hex
    return f"{prefix}{separator}{name}"


def created_now() -> int:
    """Seconds since 1970; of a resumed answer, when it began."""
    context = current_request_context()
    return context.resumption.created if context and context.resumption else int(time.time())

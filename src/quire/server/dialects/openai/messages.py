"""Messages as clients send them, and as chat templates read them."""

from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.dialects.openai.fields import refuse


class Part(Struct, kw_only=True):
    """One part of a content. Only text is understood, so what else a part of another type has does not matter."""

    type: str
    text: str | None = None


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None


_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {"audio": (), "function_call": ()}


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Plain dicts for the template. What was not given is left out, but there is always a content."""
    if not messages:
        raise BadRequest("messages is empty", "give at least one message", param="messages")
    plain = []
    for at, message in enumerate(messages):
        refuse(message, _NOT_SUPPORTED)
        if message.content is None and not message.tool_calls:
            raise BadRequest(f"messages[{at}] has no content", param=f"messages[{at}].content")
        given = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
        plain.append({**given, "content": _text(message.content, f"messages[{at}].content")})
    return plain


def _text(content: str | list[Part] | None, where: str) -> str | None:
    if not isinstance(content, list):
        return content
    for at, part in enumerate(content):
        if part.type != "text":
            raise BadRequest(
                f"a content part of type `{part.type}` is not supported", "send text", param=f"{where}[{at}].type"
            )
        if part.text is None:
            raise BadRequest(f"{where}[{at}] has no text", param=f"{where}[{at}].text")
    return "\n".join(part.text or "" for part in content)

"""Chat messages as clients of OpenAI send them, and as chat templates take them."""

from collections.abc import Sequence, Set
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.dialects.fields import refuse_unsupported
from quire.server.options import TEMPLATE_FIELDS


class ContentPart(Struct, kw_only=True):
    """One part of a content. Only text is supported, so the fields of other types are not listed."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputFunctionCall(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON in a string; some clients send the object


class InputToolCall(Struct, kw_only=True):
    id: str | None = None
    type: str | None = None
    function: InputFunctionCall


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name of reasoning_content
    tool_calls: list[InputToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Any = None  # of an earlier answer; without effect
    audio: Any = None
    function_call: Any = None


_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {"audio": (), "function_call": ()}


def plain_messages(messages: list[InputMessage]) -> list[dict[str, Any]]:
    """Dicts for the chat template. Absent fields are left out, except `content`."""
    if not messages:
        raise BadRequest("messages is empty", "give at least one message", param="messages")
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        refuse_unsupported(message, _NOT_SUPPORTED)
        if message.content is None and not message.tool_calls and message.refusal is None:
            raise BadRequest(f"{where} has no content", param=f"{where}.content")
        given = {name: getattr(message, name) for name in ("role", "name", "refusal", "tool_call_id")}
        given["reasoning_content"] = message.reasoning_content or message.reasoning
        if message.tool_calls:
            given["tool_calls"] = [
                _plain_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
            ]
        kept = {name: value for name, value in given.items() if value is not None}
        plain.append({**kept, "content": _text(message.content, f"{where}.content")})
    return plain


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """Options of the chat template that clients may set."""
    if taken := TEMPLATE_FIELDS & (given or {}).keys():
        raise BadRequest(
            f"chat_template_kwargs has `{min(taken)}`", "give it as a field of its own", param="chat_template_kwargs"
        )
    return given or {}


def _plain_call(call: InputToolCall, where: str) -> dict[str, Any]:
    """With arguments as an object, as templates expect."""
    arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = read_arguments(arguments, f"{where}.function.arguments")
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def read_arguments(text: str | None, where: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{where} is not a JSON object in a text", param=where) from None
    return arguments


def _text(content: str | list[ContentPart] | None, where: str) -> str | None:
    return joined(content, {"text"}, where) if isinstance(content, list) else content


def joined(parts: Sequence[ContentPart], kinds: Set[str], where: str) -> str:
    """The texts of parts that have one of these types, or are refusals."""
    texts = []
    for index, part in enumerate(parts):
        if part.type not in kinds and part.type != "refusal":
            raise BadRequest(
                f"a content part of type `{part.type}` is not supported", "send text", param=f"{where}[{index}].type"
            )
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if text is None:
            raise BadRequest(f"{where}[{index}] has no {name}", param=f"{where}[{index}].{name}")
        texts.append(text)
    return "\n".join(texts)

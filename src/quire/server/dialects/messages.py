"""Chat messages as clients of OpenAI send them, and as chat templates take them."""

from collections.abc import Sequence, Set
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.dialects.custom_tools import custom_arguments
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


class InputCustomCall(Struct, kw_only=True):
    name: str
    input: str = ""


class InputToolCall(Struct, kw_only=True):
    id: str | None = None
    type: str | None = None
    function: InputFunctionCall | None = None
    custom: InputCustomCall | None = None


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name of reasoning_content
    tool_calls: list[InputToolCall] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None  # of the last message: the answer continues it
    id: Any = None  # these have no effect: clients send them back with an earlier answer, or for other servers
    annotations: Any = None
    cache_control: Any = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    audio: Any = None
    function_call: Any = None


_MEDIA = {"image": "images", "audio": "audio", "video": "videos", "file": "files", "document": "files"}
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {"audio": (), "function_call": ()}


def plain_messages(messages: list[InputMessage]) -> list[dict[str, Any]]:
    """Dicts for the chat template. Absent fields are left out, except `content`."""
    if not messages:
        raise BadRequest("messages is empty", "give at least one message", param="messages")
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        refuse_unsupported(message, _NOT_SUPPORTED)
        if message.content is None and message.role != "assistant":  # an answer may be empty
            raise BadRequest(f"{where} has no content", param=f"{where}.content")
        given = {name: getattr(message, name) for name in ("role", "name", "refusal", "tool_call_id")}
        given["reasoning_content"] = message.reasoning_content or message.reasoning
        if message.tool_calls:
            given["tool_calls"] = [
                _plain_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
            ]
        kept = {name: value for name, value in given.items() if value is not None}
        content = _text(message.content, f"{where}.content")
        told = message.tool_calls or message.refusal is not None
        plain.append({**kept, "content": "" if content is None and not told else content})
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
    if call.custom is not None:
        name, arguments = call.custom.name, custom_arguments(call.custom.input)
    elif call.function is not None:
        name, given = call.function.name, call.function.arguments
        arguments = given if isinstance(given, dict) else read_arguments(given)
    else:
        raise BadRequest(f"{where} has no function", param=f"{where}.function")
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def read_arguments(text: str | None) -> dict[str, Any]:
    """What is not a JSON object, such as the arguments of a call that was cut short, is shown to the model as it is:
    clients send back whatever a model has written."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}


def _text(content: str | list[ContentPart] | None, where: str) -> str | None:
    return joined(content, {"text"}, where) if isinstance(content, list) else content


def not_text(kind: str, where: str) -> BadRequest:
    """Why a part or block of this type is refused."""
    noun = next((noun for word, noun in _MEDIA.items() if word in kind), None)
    hint = f"this model takes text, and no {noun}" if noun else "send text"
    return BadRequest(f"a content part of type `{kind}` is not supported", hint, param=where)


def joined(parts: Sequence[ContentPart], kinds: Set[str], where: str) -> str:
    """The texts of parts that have one of these types, or are refusals."""
    texts = []
    for index, part in enumerate(parts):
        if part.type not in kinds and part.type != "refusal":
            raise not_text(part.type, f"{where}[{index}].type")
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if text is None:
            raise BadRequest(f"{where}[{index}] has no {name}", param=f"{where}[{index}].{name}")
        texts.append(text)
    return "\n".join(texts)

"""The input items of a response, as clients send them and as chat templates take them."""

import base64
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.access.request_context import note_ignored
from quire.server.dialects.custom_tools import custom_arguments
from quire.server.dialects.fields import new_id
from quire.server.dialects.messages import ContentPart, joined, read_arguments
from quire.server.dialects.openai.responses.tools import full_name

_SEAL = "quire:"
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class ResponseInputPart(ContentPart, kw_only=True, omit_defaults=True):
    """Absent fields are left out when it is listed."""


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """Any item; `type` says which. A message may leave it out."""

    type: str = ""
    id: str | None = None
    status: str | None = None
    role: str | None = None  # of a message
    content: str | list[ResponseInputPart] | None = None  # of a message or of reasoning
    call_id: str | None = None  # of a call and of its output
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a call of a custom tool
    output: str | list[ResponseInputPart] | None = None
    summary: list[ResponseInputPart] | None = None  # of reasoning
    encrypted_content: str | None = None


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}

# Items of earlier turns at OpenAI that have nothing for the model to read.
_EMPTY = frozenset({"web_search_call", "file_search_call", "image_generation_call", "mcp_list_tools"})
_EMPTY |= {"tool_search_call", "tool_search_output", "ghost_snapshot"}


def input_items(given: str | list[InputItem]) -> list[InputItem]:
    """Each with a type and an id."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=[ResponseInputPart(type="input_text", text=given)])]
    items = []
    for item in given:
        kind = item.type or "message"
        items.append(msgspec.structs.replace(item, type=kind, id=item.id or new_id(_PREFIXES.get(kind, "item"), "_")))
    return items


def item_messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """Messages for the chat template. Neighbouring reasoning, text and calls of the assistant are one message."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "message":
            _add_message(messages, item, where)
        elif item.type in ("function_call", "custom_tool_call"):
            _add_call(messages, item, where)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            if not item.call_id:
                raise BadRequest(f"{where} has no call_id", param=f"{where}.call_id")
            output = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "reasoning":
            if reasoning := _reasoning(item, where):
                messages.append({"role": "assistant", "reasoning_content": reasoning})
        elif item.type in _EMPTY:
            note_ignored(f"{where} ({item.type})")
        else:
            raise BadRequest(
                f"an item of type `{item.type}` is not supported",
                "send messages, function calls and their outputs",
                param=f"{where}.type",
            )
    for message in messages:
        message.setdefault("content", "")
    return messages


def _add_message(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    if item.role is None:
        raise BadRequest(f"{where} has no role", param=f"{where}.role")
    said = {"role": item.role, "content": _text(item.content, f"{where}.content")}
    thinking = item.role == "assistant" and messages and set(messages[-1]) == {"role", "reasoning_content"}
    if thinking:
        messages[-1].update(said)
    else:
        messages.append(said)


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    call = _call(item, where)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].setdefault("content", None)
    messages[-1].setdefault("tool_calls", []).append(call)


def _call(item: InputItem, where: str) -> dict[str, Any]:
    if not item.name or not item.call_id:
        missing = "call_id" if item.name else "name"
        raise BadRequest(f"{where} has no {missing}", param=f"{where}.{missing}")
    custom = item.type == "custom_tool_call"
    arguments = custom_arguments(item.input or "") if custom else read_arguments(item.arguments)
    function = {"name": full_name(item.namespace, item.name), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _reasoning(item: InputItem, where: str) -> str:
    if item.content:
        return _text(item.content, f"{where}.content")
    return opened_reasoning(item.encrypted_content or "")


def sealed_reasoning(text: str) -> str:
    """The text as `encrypted_content`. It is no secret: the response has it too, and some clients do not send that."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def opened_reasoning(sealed: str) -> str:
    """Empty if the content was encrypted by another server."""
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode() if sealed.startswith(_SEAL) else ""
    except ValueError:
        return ""


def _text(content: str | list[ResponseInputPart] | None, where: str) -> str:
    if content is None:
        raise BadRequest(f"`{where}` is missing", param=where)
    return content if isinstance(content, str) else joined(content, _TEXTS, where)

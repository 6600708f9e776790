"""Messages of content blocks as clients send them, and as chat templates take them."""

from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import BadRequest


class InputBlock(Struct, kw_only=True, forbid_unknown_fields=True):
    cache_control: Any = None  # without effect: prefixes are always cached


class TextBlock(InputBlock, tag="text"):
    text: str
    citations: Any = None


class ThinkingBlock(InputBlock, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(InputBlock, tag="redacted_thinking"):
    data: str


class ToolUseBlock(InputBlock, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(InputBlock, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


AnyBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class AnthropicInputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[AnyBlock]


def joined(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def plain_messages(system: str | list[TextBlock] | None, messages: list[AnthropicInputMessage]) -> list[dict[str, Any]]:
    """Tool results become messages of their own; neighbours with the same role become one message."""
    if not messages:
        raise BadRequest("messages: at least one message is required", param="messages")
    plain: list[dict[str, Any]] = [{"role": "system", "content": joined(system)}] if system else []
    texts: list[str] = []  # of the last message, where it has several
    for index, message in enumerate(messages):
        if not message.content and (message.role == "user" or message is not messages[-1]):
            said = "all messages must have non-empty content except for the optional final assistant message"
            raise BadRequest(f"messages.{index}: {said}", param=f"messages.{index}")
        for part in _parts(message, f"messages.{index}.content"):
            last = plain[-1] if plain else {}
            if part.keys() == last.keys() == {"role", "content"} and part["role"] == last["role"]:
                texts = texts or [last["content"]]
                texts.append(part["content"])
            else:
                _end_message(plain, texts)
                texts = []
                plain.append(part)
    _end_message(plain, texts)
    return plain


def _end_message(plain: list[dict[str, Any]], texts: list[str]) -> None:
    """Joined once: adding each text to the ones before takes time that grows with the square of their number."""
    if texts:
        plain[-1]["content"] = "\n".join(texts)


def _parts(message: AnthropicInputMessage, where: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if message.role == "user":
        _only(message.content, TextBlock | ToolResultBlock, "user", where)
        results = [_result(block) for block in message.content if isinstance(block, ToolResultBlock)]
        said = [{"role": "user", "content": joined(texts)}] if texts or not results else []
        return [*results, *said]
    _only(message.content, TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, "assistant", where)
    part: dict[str, Any] = {"role": "assistant", "content": joined(texts)}
    if reasoning := [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]:
        part["reasoning_content"] = "\n".join(reasoning)
    if calls := [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]:
        part["tool_calls"] = calls
    return [part]


def _result(block: ToolResultBlock) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _only(content: list[AnyBlock], kinds: Any, role: str, where: str) -> None:
    for index, block in enumerate(content):
        if not isinstance(block, kinds):
            kind = block.__struct_config__.tag
            raise BadRequest(
                f"{where}.{index}: {role} messages cannot have `{kind}` blocks", param=f"{where}.{index}.type"
            )

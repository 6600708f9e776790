"""Messages of content blocks as clients send them, and as chat templates take them."""

from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.access.request_context import note_ignored


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


class DocumentSource(Struct, kw_only=True):
    type: str
    data: str = ""
    content: str | list[TextBlock] | None = None


class DocumentBlock(InputBlock, tag="document"):
    """Served where its source is text."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(InputBlock, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]
    citations: Any = None


class ToolReferenceBlock(InputBlock, tag="tool_reference"):
    """A tool that a search for tools found. All tools are shown to the model, so there is nothing to add."""

    tool_name: str


ReadableBlock = TextBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(InputBlock, tag="tool_result"):
    tool_use_id: str
    content: str | list[ReadableBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


class ServerToolUseBlock(Struct, kw_only=True, tag="server_tool_use"):
    """These tell what Anthropic's servers did in earlier turns, and are left out."""

    id: str = ""


class WebSearchResultBlock(ServerToolUseBlock, tag="web_search_tool_result"):
    pass


class WebFetchResultBlock(ServerToolUseBlock, tag="web_fetch_tool_result"):
    pass


class ToolSearchResultBlock(ServerToolUseBlock, tag="tool_search_tool_result"):
    pass


ReasoningBlock = ThinkingBlock | RedactedThinkingBlock
ServerBlock = ServerToolUseBlock | WebSearchResultBlock | WebFetchResultBlock | ToolSearchResultBlock
AnyBlock = ReadableBlock | ReasoningBlock | ToolUseBlock | ToolResultBlock | ServerBlock


class AnthropicInputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


def joined(content: "str | list[Any] | None", where: str = "") -> str:
    if not isinstance(content, list):
        return content or ""
    texts = [_readable(block, where) for block in content]
    return "\n".join(text for text in texts if text is not None)


def _readable(block: ReadableBlock | ToolReferenceBlock, where: str) -> str | None:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return f"{block.title}\n{block.source}\n{joined(block.content)}"
    if isinstance(block, ToolReferenceBlock):
        return None
    if block.source.type not in ("text", "content"):
        raise BadRequest(
            f"{where}: a document whose source is `{block.source.type}` is not supported",
            "this model takes text, and no files",
            param=where,
        )
    parts = [block.title, block.context, block.source.data or joined(block.source.content, where)]
    return "\n".join(part for part in parts if part)


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
    texts = [block for block in message.content if isinstance(block, ReadableBlock)]
    if message.role == "system":
        _only(message.content, TextBlock, "system", where)
        return [{"role": "system", "content": joined(texts)}]
    if message.role == "user":
        _only(message.content, ReadableBlock | ToolResultBlock, "user", where)
        results = [_result(block, where) for block in message.content if isinstance(block, ToolResultBlock)]
        said = [{"role": "user", "content": joined(texts, where)}] if texts or not results else []
        return [*results, *said]
    _only(message.content, TextBlock | ReasoningBlock | ToolUseBlock | ServerBlock, "assistant", where)
    for index, block in enumerate(message.content):
        if isinstance(block, ServerBlock):
            note_ignored(f"{where}.{index} ({block.__struct_config__.tag})")
    part: dict[str, Any] = {"role": "assistant", "content": joined(texts)}
    if reasoning := [b.thinking for b in message.content if isinstance(b, ThinkingBlock) and b.thinking.strip()]:
        part["reasoning_content"] = "\n".join(reasoning)
    if calls := [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]:
        part["tool_calls"] = calls
    return [part]


def _result(block: ToolResultBlock, where: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content, where)}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _only(content: list[AnyBlock], kinds: Any, role: str, where: str) -> None:
    for index, block in enumerate(content):
        if not isinstance(block, kinds):
            kind = block.__struct_config__.tag
            raise BadRequest(
                f"{where}.{index}: {role} messages cannot have `{kind}` blocks", param=f"{where}.{index}.type"
            )

"""The objects of Anthropic's responses."""

from typing import Any, NotRequired, TypedDict

import msgspec
from msgspec import Struct

from quire.core.errors import PromptTooLong, QueueFull, QuireError, Unavailable
from quire.server.http.wire_format import WireFormat

_encode = msgspec.json.Encoder().encode


class AnthropicUsage(Struct, kw_only=True):
    input_tokens: int  # prompt tokens that were not cached
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0  # prompt tokens that were cached

    @classmethod
    def of(cls, num_prompt: int, num_cached: int, num_output: int) -> "AnthropicUsage":
        return cls(input_tokens=num_prompt - num_cached, cache_read_input_tokens=num_cached, output_tokens=num_output)


class TextContent(Struct, tag="text"):
    text: str = ""


SIGNATURE = "quire"  # of all reasoning: clients do not send back what has none, and here it is not looked at


class ThinkingContent(Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""  # of a stream: comes at the end of the block


class ToolUseContent(Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicMessage(Struct, kw_only=True, tag="message"):
    id: str
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    role: str = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class InputDelta(Struct, tag="input_json_delta"):
    partial_json: str


class MessageStart(Struct, tag="message_start"):
    message: AnthropicMessage


class Ping(Struct, tag="ping"):
    pass


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: TextContent | ThinkingContent | ToolUseContent


class BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    delta: MessageEnd
    usage: AnthropicUsage


class MessageStop(Struct, tag="message_stop"):
    pass


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_status(error: QuireError) -> int:
    return 529 if isinstance(error, QueueFull | Unavailable) else error.status


class ErrorDetails(TypedDict):
    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class AnthropicErrorBody(TypedDict):
    type: str
    error: AnthropicErrorDetail


def error_body(error: QuireError) -> AnthropicErrorBody:
    status = error_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"  # clients look for this
    problem: AnthropicErrorDetail = {"type": kind, "message": message}
    if error.code.endswith("_unsupported_request"):  # tells the client what to leave out
        problem["details"] = {"error_code": error.code, "unsupported": [error.param or ""]}
    return {"type": "error", "error": problem}


def sse(value: Any) -> bytes:
    kind: str = value["type"] if isinstance(value, dict) else value.__struct_config__.tag
    return b"event: " + kind.encode() + b"\ndata: " + _encode(value) + b"\n\n"


WIRE = WireFormat(error=error_body, frame=sse, status=error_status)

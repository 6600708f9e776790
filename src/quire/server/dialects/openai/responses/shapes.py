"""POST /v1/responses: the objects of the response."""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.server.dialects.openai.chat_call import ChatLogprob
from quire.server.dialects.openai.shapes import KEEP_ALIVE, CachedTokens, error_body
from quire.server.http.wire_format import WireFormat


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: str = "in_progress"
    content: list[OutputText]


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    encrypted_content: str | UnsetType = UNSET  # on demand: the text, for clients that send no other back
    status: str = "in_progress"
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCallItem(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class ReasoningTokens(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int  # seconds since 1970
    status: str
    background: bool
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; `type` says which fields it has."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    code: str | UnsetType = UNSET  # of an error
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


_encode = msgspec.json.Encoder().encode


def response_sse(value: object) -> bytes:
    if isinstance(value, dict):  # an error in the middle of a stream
        error = value["error"]
        value = ResponseEvent(type="error", code=error["code"], message=error["message"], param=error["param"])
    assert isinstance(value, ResponseEvent)
    return b"event: " + value.type.encode() + b"\ndata: " + _encode(value) + b"\n\n"


WIRE = WireFormat(error=error_body, frame=response_sse, keep_alive=KEEP_ALIVE)

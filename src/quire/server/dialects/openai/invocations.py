"""POST /invocations, the one path that SageMaker calls: a chat or a completion."""

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.dialects.dialect import Context
from quire.server.dialects.openai.chat import NOT_SUPPORTED_IN_CHATS, ChatBody, parse_chat
from quire.server.dialects.openai.chat_call import ChatCall, ChatChoice
from quire.server.dialects.openai.completions import CompletionCall, parse_completion
from quire.server.dialects.openai.shapes import CompletionObject
from quire.server.http.body import decode
from quire.server.http.openapi import EVENTS, JSON, request_body, responses


class _Either(Struct):
    """The fields that distinguish the two."""

    messages: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Either)


@request_body(ChatBody, only=NOT_SUPPORTED_IN_CHATS)
@responses({JSON: CompletionObject[ChatChoice], EVENTS: CompletionObject[ChatChoice]})
def parse_invocation(body: bytes, context: Context) -> ChatCall | CompletionCall:
    either = decode(body, _decoder)
    if bytes(either.messages) != b"null":
        return parse_chat(body, context)
    if bytes(either.prompt) != b"null":
        return parse_completion(body, context)
    raise BadRequest("there are neither messages nor a prompt", "send a chat or a completion", param="messages")

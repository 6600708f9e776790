"""POST /v1/messages/count_tokens"""

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.dialects.anthropic.fields import PromptBody, explain, template_options, tool_use
from quire.server.dialects.anthropic.messages import plain_messages
from quire.server.dialects.anthropic.shapes import WIRE
from quire.server.dialects.chat_request import prompt_text
from quire.server.dialects.chat_text import num_text_tokens
from quire.server.dialects.dialect import Context
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response, with_wire_errors

if TYPE_CHECKING:
    from quire.server.app_state import AppState

_decoder = msgspec.json.Decoder(PromptBody)


def anthropic_routes(state: "AppState") -> list[Route]:
    @request_body(PromptBody)
    @responses({JSON: dict[str, int]})
    async def count_tokens(http: Request) -> Response:
        body = await read_json(http, state.options.max_body_bytes, _decoder, explained=explain)
        service = (await state.models.find(body.model)).service
        context = Context(service.info, service.tokenizer, options=state.options)
        return json_response({"input_tokens": await asyncio.to_thread(_count, body, context)})

    return [Route("/v1/messages/count_tokens", with_wire_errors(count_tokens, WIRE), methods=["POST"])]


def _count(body: PromptBody, context: Context) -> int:
    messages = plain_messages(body.system, body.messages)
    return num_text_tokens(context, prompt_text(context, messages, tool_use(body), **template_options(body, context)))

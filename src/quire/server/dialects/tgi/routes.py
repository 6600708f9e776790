"""GET /info and POST /chat_tokenize."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.server.dialects.chat_request import prompt_text
from quire.server.dialects.dialect import Context
from quire.server.dialects.messages import InputMessage, plain_messages
from quire.server.dialects.tgi.fields import MAX_BEST_OF, MAX_STOP_SEQUENCES, MAX_TOP_N_TOKENS
from quire.server.dialects.tgi.shapes import WIRE
from quire.server.dialects.token_spans import TokenSpan, checked_text, token_spans
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response, with_wire_errors
from quire.text.chat.chat_format import NO_TOOLS

if TYPE_CHECKING:
    from quire.server.app_state import AppState


class ChatTokenizeBody(Struct):
    messages: list[InputMessage]
    model: str | None = None


class ChatTokenized(Struct):
    tokenize_response: list[TokenSpan]
    templated_text: str


_decoder = msgspec.json.Decoder(ChatTokenizeBody)


def tgi_routes(state: "AppState") -> list[Route]:
    @responses({JSON: dict[str, Any]})
    async def info(http: Request) -> Response:
        service = (await state.models.find(None)).service
        return json_response(
            {
                "model_id": service.info.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": None,
                "max_best_of": MAX_BEST_OF,
                "max_stop_sequences": MAX_STOP_SEQUENCES,
                "max_top_n_tokens": MAX_TOP_N_TOKENS,
                "max_input_tokens": service.info.max_model_len - 1,
                "max_total_tokens": service.info.max_model_len,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": "quire",
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )

    @request_body(ChatTokenizeBody)
    @responses({JSON: ChatTokenized})
    async def chat_tokenize(http: Request) -> Response:
        body = await read_json(http, state.options.max_body_bytes, _decoder)
        service = (await state.models.find(body.model)).service
        context = Context(service.info, service.tokenizer, options=state.options)
        return await asyncio.to_thread(lambda: json_response(_tokenized(context, plain_messages(body.messages))))

    return [
        Route("/info", with_wire_errors(info, WIRE)),
        Route("/chat_tokenize", with_wire_errors(chat_tokenize, WIRE), methods=["POST"]),
    ]


def _tokenized(context: Context, messages: list[dict[str, Any]]) -> ChatTokenized:
    text = prompt_text(context, messages, NO_TOOLS)
    ids = context.tokenizer.encode(checked_text(text), add_special_tokens=False)
    return ChatTokenized(token_spans(context.tokenizer, ids, text), text)

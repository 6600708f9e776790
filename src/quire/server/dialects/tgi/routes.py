"""GET /info and POST /chat_tokenize."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.server.dialects.chat_text import chat_text
from quire.server.dialects.messages import InputMessage, plain_messages
from quire.server.dialects.tgi.fields import MAX_BEST_OF, MAX_STOP_SEQUENCES, MAX_TOP_N_TOKENS
from quire.server.dialects.tgi.shapes import error_body, error_status
from quire.server.http.body import decode, read_body
from quire.server.http.openapi import JSON, answers, reads
from quire.server.http.replies import json_response, with_error_shape

if TYPE_CHECKING:
    from quire.server.app_state import AppState
    from quire.text.tokenizers.tokenizer import Tokenizer


class ChatTokenizeBody(Struct):
    messages: list[InputMessage]
    model: str | None = None


class TokenSpan(Struct):
    id: int
    text: str
    start: int  # characters of the text; a token that is a part of one covers all of it
    stop: int


class ChatTokenized(Struct):
    tokenize_response: list[TokenSpan]
    templated_text: str


_decoder = msgspec.json.Decoder(ChatTokenizeBody)


def tgi_routes(state: "AppState") -> list[Route]:
    @answers({JSON: dict[str, Any]})
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

    @reads(ChatTokenizeBody)
    @answers({JSON: ChatTokenized})
    async def chat_tokenize(http: Request) -> Response:
        body = decode(await read_body(http, state.options.max_body_bytes), _decoder)
        tokenizer = (await state.models.find(body.model)).service.tokenizer
        return json_response(await asyncio.to_thread(_tokenized, tokenizer, plain_messages(body.messages)))

    return [
        Route("/info", with_error_shape(info, error_body, error_status)),
        Route("/chat_tokenize", with_error_shape(chat_tokenize, error_body, error_status), methods=["POST"]),
    ]


def _tokenized(tokenizer: "Tokenizer", messages: list[dict[str, Any]]) -> ChatTokenized:
    text = chat_text(tokenizer, messages)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ChatTokenized(token_spans(tokenizer, ids, text), text)


def token_spans(tokenizer: "Tokenizer", ids: list[int], text: str) -> list[TokenSpan]:
    """Where in the text each token is."""
    owner = [at for at, letter in enumerate(text) for _ in letter.encode()]  # byte -> its character
    found, end = [], -int(tokenizer.strips_space)  # the encoder put a space before the text
    for token in ids:
        begin, end = max(end, 0), end + len(tokenizer.token_bytes(token))
        covered = owner[begin : max(end, 0)]
        start, stop = (covered[0], covered[-1] + 1) if covered else (len(text), len(text))
        found.append(TokenSpan(token, text[start:stop], start, stop))
    return found

"""POST /tokenize and /detokenize and GET /tokenizer_info, as in vLLM."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import BadRequest
from quire.server.app_state import AppState
from quire.server.dialects.chat_text import chat_text
from quire.server.dialects.messages import InputMessage, plain_messages, template_kwargs
from quire.server.dialects.token_spans import TokenSpan, checked_text, token_spans
from quire.server.dialects.tools import ToolDefinition, tool_use
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, query_parameters, request_body, responses
from quire.server.http.replies import json_response
from quire.text.chat.chat_format import chat_format

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    inputs: str | None = None  # Text Generation Inference's prompt; answered with a list of spans
    messages: list[InputMessage] | None = None
    add_special_tokens: bool | None = None  # for a prompt, true unless given; a rendered chat has its own
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class TokenizerRoutes:
    def __init__(self, state: AppState) -> None:
        self._models = state.models
        self._limit = state.options.max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.info),
        ]

    @request_body(TokenizeBody)
    @responses({JSON: Tokenized | list[TokenSpan]})
    async def tokenize(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _tokenize)
        service = (await self._models.find(body.model)).service
        tokenizer = service.tokenizer
        if body.inputs is not None:
            if body.prompt is not None or body.messages is not None:
                raise BadRequest("inputs and another text are given", "give one of them", param="inputs")
            return await asyncio.to_thread(lambda: json_response(_spans(tokenizer, checked_text(body.inputs or ""))))
        limit = service.info.max_model_len
        return await asyncio.to_thread(lambda: json_response(_tokenized(tokenizer, body, limit)))

    @request_body(DetokenizeBody)
    @responses({JSON: Detokenized})
    async def detokenize(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _detokenize)
        service = (await self._models.find(body.model)).service
        tokenizer, vocab_size = service.tokenizer, service.info.vocab_size
        return await asyncio.to_thread(lambda: json_response(Detokenized(_decoded(tokenizer, body.tokens, vocab_size))))

    @query_parameters(model=str)
    @responses({JSON: dict[str, Any]})
    async def info(self, http: Request) -> Response:
        """What clients such as lm-eval need, which leave tokenizing to the server."""
        service = (await self._models.find(http.query_params.get("model"))).service
        tokenizer = service.tokenizer
        return json_response(
            {
                **tokenizer.special_tokens,
                "tokenizer_class": "Tokenizer",
                "model_max_length": service.info.max_model_len,
                "chat_template": tokenizer.chat_template,
            }
        )


def _tokenized(tokenizer: "Tokenizer", body: TokenizeBody, max_model_len: int) -> Tokenized:
    ids = _encode(tokenizer, body)
    texts = list(map(tokenizer.token_text, ids)) if body.return_token_strs else None
    return Tokenized(len(ids), max_model_len, ids, texts)


def _decoded(tokenizer: "Tokenizer", ids: list[int], vocab_size: int) -> str:
    if (unknown := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
        raise BadRequest(f"token id {unknown} is not in the vocabulary, which has {vocab_size}", param="tokens")
    return tokenizer.decode(ids, skip_special_tokens=False)


def _spans(tokenizer: "Tokenizer", text: str) -> list[TokenSpan]:
    """Tokens that the tokenizer adds have an empty span."""
    ids, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    starts = range(len(ids) - len(plain) + 1)
    first = next((start for start in starts if ids[start : start + len(plain)] == plain), None)
    if first is None:  # which tokens were added is unknown
        return token_spans(tokenizer, plain, text)
    added = [TokenSpan(token, "", 0, 0) for token in ids[:first] + ids[first + len(plain) :]]
    return added[:first] + token_spans(tokenizer, plain, text) + added[first:]


def _encode(tokenizer: "Tokenizer", body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    if body.prompt is not None:
        return tokenizer.encode(checked_text(body.prompt), add_special_tokens=body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise BadRequest("a rendered chat has its special tokens", "leave it out", param="add_special_tokens")
    continues = bool(body.continue_final_message)
    form, use = chat_format(tokenizer.chat_template or ""), tool_use(body.tools, None, None)
    text = chat_text(
        tokenizer,
        form.messages(plain_messages(body.messages or []), use),
        tools=form.template_tools(use),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        **template_kwargs(body.chat_template_kwargs),
    )
    return tokenizer.encode(checked_text(text), add_special_tokens=False)

"""POST /tokenize and /detokenize and GET /tokenizer_info, as in vLLM; the first two also as in others."""

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import BadRequest
from quire.server.app_state import AppState
from quire.server.dialects.chat_request import prompt_text
from quire.server.dialects.dialect import Context
from quire.server.dialects.messages import InputMessage, plain_messages, template_kwargs
from quire.server.dialects.token_spans import TokenSpan, checked_text, token_spans
from quire.server.dialects.tools import ToolDefinition, tool_use
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, query_parameters, request_body, responses
from quire.server.http.replies import json_response

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    inputs: str | None = None  # Text Generation Inference's prompt; answered with a list of spans
    content: str | None = None  # llama-server's prompt, and these three its options; answered in its shape
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Literal[True] | None = None  # special tokens are always recognized
    messages: list[InputMessage] | None = None
    add_special_tokens: bool | None = None  # to a prompt, unless false; to a rendered chat, which has its own, if true
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class TokenPiece(Struct):
    id: int
    piece: str | list[int]  # bytes, where they are part of a character


class Tokenized(Struct, kw_only=True):
    """As in vLLM; llama-server has the tokens alone, on demand with their texts."""

    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    tokens: list[int | TokenPiece]
    token_strs: list[str] | UnsetType | None = UNSET


class Detokenized(Struct):
    prompt: str
    content: str  # the prompt, as clients of llama-server call it
    text: str  # the prompt, as clients of SGLang call it


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class TokenizerRoutes:
    def __init__(self, state: AppState) -> None:
        self._models = state.models
        self._options = state.options
        self._limit = state.options.max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),  # SGLang's paths
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.info),
        ]

    @request_body(TokenizeBody)
    @responses({JSON: Tokenized | list[TokenSpan]})
    async def tokenize(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _tokenize)
        service = (await self._models.find(body.model)).service
        tokenizer = service.tokenizer
        if sum(text is not None for text in (body.prompt, body.inputs, body.content, body.messages)) != 1:
            raise BadRequest("give one of `prompt`, `messages`, `inputs` and `content`", param="prompt")
        if body.content is not None:
            return await asyncio.to_thread(lambda: json_response(_pieces(tokenizer, body)))
        if body.inputs is not None:
            return await asyncio.to_thread(lambda: json_response(_spans(tokenizer, checked_text(body.inputs or ""))))
        context = Context(service.info, tokenizer, options=self._options)
        return await asyncio.to_thread(lambda: json_response(_tokenized(context, body)))

    @request_body(DetokenizeBody)
    @responses({JSON: Detokenized})
    async def detokenize(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _detokenize)
        service = (await self._models.find(body.model)).service
        tokenizer, vocab_size = service.tokenizer, service.info.vocab_size

        def detokenized() -> Response:
            text = _decoded(tokenizer, body.tokens, vocab_size)
            return json_response(Detokenized(text, text, text))

        return await asyncio.to_thread(detokenized)

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


def _tokenized(context: Context, body: TokenizeBody) -> Tokenized:
    ids = _encode(context, body)
    texts = list(map(context.tokenizer.token_name, ids)) if body.return_token_strs else None
    max_model_len = context.info.max_model_len
    return Tokenized(count=len(ids), max_model_len=max_model_len, tokens=[*ids], token_strs=texts)


def _pieces(tokenizer: "Tokenizer", body: TokenizeBody) -> Tokenized:
    ids = tokenizer.encode(checked_text(body.content or ""), add_special_tokens=bool(body.add_special))
    return Tokenized(tokens=[TokenPiece(t, _piece(tokenizer, t)) for t in ids] if body.with_pieces else [*ids])


def _piece(tokenizer: "Tokenizer", token: int) -> str | list[int]:
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _decoded(tokenizer: "Tokenizer", ids: list[int], vocab_size: int) -> str:
    if (unknown := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
        raise BadRequest(f"token id {unknown} is not in the vocabulary, which has {vocab_size}", param="tokens")
    return tokenizer.decode(ids, skip_special_tokens=False)


def _spans(tokenizer: "Tokenizer", text: str) -> list[TokenSpan]:
    """Tokens that the tokenizer adds have an empty span."""
    ids, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    starts = range(len(ids) - len(plain) + 1)
    first = next((start for start in starts if ids[start : start + len(plain)] == plain), None)
    if first is None:  # it is unknown which tokens were added
        return token_spans(tokenizer, plain, text)
    added = [TokenSpan(token, "", 0, 0) for token in ids[:first] + ids[first + len(plain) :]]
    return added[:first] + token_spans(tokenizer, plain, text) + added[first:]


def _encode(context: Context, body: TokenizeBody) -> list[int]:
    tokenizer = context.tokenizer
    if body.prompt is not None:
        return tokenizer.encode(checked_text(body.prompt), add_special_tokens=body.add_special_tokens is not False)
    continues = bool(body.continue_final_message)
    text = prompt_text(
        context,
        plain_messages(body.messages or []),
        tool_use(body.tools, None, None),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        **template_kwargs(body.chat_template_kwargs),
    )
    return tokenizer.encode(checked_text(text), add_special_tokens=bool(body.add_special_tokens))

"""GET /props, POST /apply-template and /embedding; /slots, which says what there is instead."""

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.client.embed_request import EmbedRequest
from quire.server.dialects.chat_text import chat_text
from quire.server.dialects.fields import new_id
from quire.server.dialects.llama_server.fields import SHOWN_DEFAULTS
from quire.server.dialects.llama_server.shapes import WIRE
from quire.server.dialects.messages import InputMessage, plain_messages, template_kwargs
from quire.server.dialects.tools import ToolDefinition, tool_use
from quire.server.errors import UnknownPath
from quire.server.http.body import decode, read_body, texts_or_ids
from quire.server.http.event_stream import unless_disconnected
from quire.server.http.openapi import JSON, query_parameters, request_body, responses
from quire.server.http.replies import json_response, with_wire_errors
from quire.text.chat.chat_format import chat_format

if TYPE_CHECKING:
    from quire.server.app_state import AppState
    from quire.text.tokenizers.tokenizer import Tokenizer


class TemplateBody(Struct, kw_only=True):
    messages: list[InputMessage]
    model: str | None = None
    tools: list[ToolDefinition] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Templated(Struct):
    prompt: str


class ContentBody(Struct, kw_only=True):
    content: str | list[str | int | list[int]]  # a text, texts, token ids, or lists of token ids
    model: str | None = None


class SlotFile(Struct, kw_only=True):
    filename: str | None = None


class LlamaEmbedding(Struct):
    index: int
    embedding: list[list[float]]  # of a text as a whole: one


_KEPT = "every prefix is kept and found again by itself, with --kv-disk-path also after a restart"
_SLOT_ACTIONS = {"save": _KEPT, "restore": _KEPT, "erase": "POST /reset_prefix_cache forgets what a key has cached"}

_template = msgspec.json.Decoder(TemplateBody)
_content = msgspec.json.Decoder(ContentBody)


def llama_server_routes(state: "AppState") -> list[Route]:
    @query_parameters(model=str)
    @responses({JSON: dict[str, Any]})
    async def props(http: Request) -> Response:
        service = (await state.models.find(http.query_params.get("model"))).service
        tokenizer = service.tokenizer
        return json_response(
            {
                "default_generation_settings": {"n_ctx": service.info.max_model_len, "params": SHOWN_DEFAULTS},
                "total_slots": 1,
                "model_alias": service.info.name,
                "model_path": service.info.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": tokenizer.chat_template or "",
                "bos_token": tokenizer.bos_token or "",
                "eos_token": tokenizer.eos_token or "",
                "build_info": f"quire {__version__}",
            }
        )

    @request_body(TemplateBody)
    @responses({JSON: Templated})
    async def apply_template(http: Request) -> Response:
        body = decode(await read_body(http, state.options.max_body_bytes), _template)
        tokenizer = (await state.models.find(body.model)).service.tokenizer
        return json_response(Templated(await asyncio.to_thread(_rendered, tokenizer, body)))

    @request_body(ContentBody)
    @responses({JSON: list[LlamaEmbedding]})
    async def embedding(http: Request) -> Response:
        body = decode(await read_body(http, state.options.max_body_bytes), _content)
        service = (await state.models.find(body.model)).service
        request = EmbedRequest(id=new_id("embd"), texts=[*texts_or_ids(body.content, "content")])
        embeddings = await unless_disconnected(http.receive, service.embed(request))
        vectors = map(array.tolist, embeddings.vectors)
        return json_response([LlamaEmbedding(index, [vector]) for index, vector in enumerate(vectors)])

    @responses({JSON: list[dict[str, Any]]})
    async def slots(http: Request) -> Response:
        raise UnknownPath(
            "there are no slots: each request has its own blocks of the KV cache", "GET /live shows what runs"
        )

    @query_parameters(action=str)
    @request_body(SlotFile)
    @responses({JSON: dict[str, Any]})
    async def slot_action(http: Request) -> Response:
        action = http.query_params.get("action", "")
        raise UnknownPath(
            f"there are no slots, so no action `{action}`", _SLOT_ACTIONS.get(action, _SLOT_ACTIONS["save"])
        )

    return [
        Route("/slots", with_wire_errors(slots, WIRE)),
        Route("/slots/{id_slot}", with_wire_errors(slot_action, WIRE), methods=["POST"]),
        Route("/props", with_wire_errors(props, WIRE)),
        Route("/apply-template", with_wire_errors(apply_template, WIRE), methods=["POST"]),
        Route("/embedding", with_wire_errors(embedding, WIRE), methods=["POST"]),
    ]


def _rendered(tokenizer: "Tokenizer", body: TemplateBody) -> str:
    form, use = chat_format(tokenizer.chat_template or ""), tool_use(body.tools, None, None)
    return chat_text(
        tokenizer,
        form.messages(plain_messages(body.messages), use),
        tools=form.template_tools(use),
        add_generation_prompt=body.add_generation_prompt is not False,
        **template_kwargs(body.chat_template_kwargs),
    )

"""The routes of Ollama about its models."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.client.checkpoint_facts import CheckpointFacts, checkpoint_facts
from quire.server.dialects.ollama.embed import EmbedRoutes
from quire.server.dialects.ollama.pull import ModelBody, PullRoute, decoder
from quire.server.dialects.ollama.shapes import WIRE, timestamp
from quire.server.errors import NotAllowed
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response, with_wire_errors
from quire.server.options import ServerOptions
from quire.text.chat.chat_format import chat_format
from quire.text.chat.fill_in_middle import fim_prompt

if TYPE_CHECKING:
    from quire.client.service import ServedModel, Service
    from quire.server.app_state import AppState

NEVER = "2318-01-01T00:00:00Z"  # when a model that is kept loaded expires


def ollama_routes(state: "AppState") -> list[Route]:
    routes, embedding = OllamaModelRoutes(state), EmbedRoutes(state)

    def route(path: str, endpoint: Any, method: str = "GET") -> Route:
        return Route(path, with_wire_errors(endpoint, WIRE), methods=[method])

    return [
        route("/api/version", routes.version),
        route("/api/tags", routes.tags),
        route("/api/ps", routes.running),
        route("/api/show", routes.show, "POST"),
        route("/api/pull", PullRoute(state).pull, "POST"),
        route("/api/embed", embedding.embed, "POST"),
        route("/api/embeddings", embedding.embeddings, "POST"),
        route("/api/delete", not_allowed, "DELETE"),
        *(route(f"/api/{path}", not_allowed, "POST") for path in ("copy", "create", "push", "blobs/{digest}")),
    ]


@request_body(ModelBody)
@responses({JSON: dict[str, str]})
async def not_allowed(http: Request) -> Response:
    raise NotAllowed(
        "the models of this server cannot be changed by request",
        "its operator names them when it starts; where --allow-pull is set, /api/pull adds to them",
    )


class OllamaModelRoutes:
    def __init__(self, state: "AppState") -> None:
        self._models = state.models
        self._options, self._limit = state.options, state.options.max_body_bytes
        self._since = timestamp(time.time())

    @responses({JSON: dict[str, str]})
    async def version(self, http: Request) -> Response:
        return json_response({"version": __version__})

    @responses({JSON: dict[str, list[dict[str, Any]]]})
    async def tags(self, http: Request) -> Response:
        return json_response({"models": [await self._listed(model) for model in self._models.offers()]})

    @responses({JSON: dict[str, list[dict[str, Any]]]})
    async def running(self, http: Request) -> Response:
        loaded = [model for model in self._models.offers() if model.info is not None]
        return json_response({"models": [await self._running(model) for model in loaded]})

    @request_body(ModelBody)
    @responses({JSON: dict[str, Any]})
    async def show(self, http: Request) -> Response:
        wanted = (await read_json(http, self._limit, decoder, json_only=False)).wanted
        service = (await self._models.find(wanted)).service
        facts = await asyncio.to_thread(checkpoint_facts, service.info.path)
        family = facts.family or "quire"
        return json_response(
            {
                "modelfile": f"FROM {service.info.name}\n",
                "parameters": "",
                "template": service.tokenizer.chat_template or "",
                "details": _details(facts),
                "model_info": {
                    "general.architecture": family,
                    "general.parameter_count": facts.num_parameters,
                    f"{family}.context_length": service.info.max_model_len,
                    f"{family}.embedding_length": service.info.dimensions,
                    f"{family}.vocab_size": service.info.vocab_size,
                },
                "capabilities": _capabilities(service, self._options),
                "modified_at": self._since,
            }
        )

    async def _listed(self, model: "ServedModel") -> dict[str, Any]:
        facts = await asyncio.to_thread(checkpoint_facts, model.info.path) if model.info else CheckpointFacts()
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": self._since,
            "size": model.info.weight_bytes if model.info else 0,
            "digest": "",
            "details": _details(facts, model.adapter_of),
        }

    async def _running(self, model: "ServedModel") -> dict[str, Any]:
        assert model.info is not None
        listed = await self._listed(model)
        del listed["modified_at"]
        size = model.info.weight_bytes + model.info.cache_bytes
        return {
            **listed,
            "size": size,
            "expires_at": NEVER,
            "size_vram": size,
            "context_length": model.info.max_model_len,
        }


def _details(facts: CheckpointFacts, parent: str = "") -> dict[str, Any]:
    return {
        "parent_model": parent,
        "format": facts.format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _rounded(facts.num_parameters),
        "quantization_level": facts.storage,
    }


def _rounded(number: int) -> str:
    """134515008 is 134.52M, as Ollama writes it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number or "")


def _capabilities(service: "Service", options: ServerOptions) -> list[str]:
    """What clients offer to their users."""
    if service.info.task != "generate":
        return ["embedding"]
    form = chat_format(service.tokenizer.chat_template or "", options.tool_call_parser, options.reasoning_parser)
    able = {
        "completion": True,
        "tools": service.tokenizer.chat_template is not None and form.tools is not None,
        "thinking": form.reasoning is not None,
        "insert": fim_prompt(service.tokenizer, "", "") is not None,
    }
    return [name for name, can in able.items() if can]

"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM.

They make the server read a directory of its machine, or download one, so the operator has to allow them."""

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.server.errors import NotAllowed
from quire.server.http.body import read_json
from quire.server.http.openapi import request_body, responses

if TYPE_CHECKING:
    from quire.server.app_state import AppState

log = logging.getLogger("quire.server")

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadBody(Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: Name
    lora_path: Name
    load_inplace: bool = False  # replace an adapter of that name; requests in flight keep the old one
    base_model_name: str | None = None  # needed where several models are served


class UnloadBody(Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: Name
    lora_int_id: int | None = None  # of vLLM; without effect


_load = msgspec.json.Decoder(LoadBody)
_unload = msgspec.json.Decoder(UnloadBody)


class AdapterRoutes:
    def __init__(self, state: "AppState") -> None:
        self._models, self._options = state.models, state.options

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    @request_body(LoadBody)
    @responses({"text/plain": str})
    async def load(self, http: Request) -> Response:
        self._check()
        body = await read_json(http, self._options.max_body_bytes, _load)
        await self._models.load_adapter(body.lora_name, body.lora_path, body.load_inplace, body.base_model_name)
        log.info("adapter `%s` loaded from %s", body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @request_body(UnloadBody)
    @responses({"text/plain": str})
    async def unload(self, http: Request) -> Response:
        self._check()
        body = await read_json(http, self._options.max_body_bytes, _unload)
        await self._models.unload_adapter(body.lora_name)
        log.info("adapter `%s` unloaded", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check(self) -> None:
        if not self._options.allow_runtime_lora_updating:
            raise NotAllowed(
                "adapters cannot be loaded or unloaded over HTTP here",
                "the operator can allow it with --allow-runtime-lora-updating",
            )

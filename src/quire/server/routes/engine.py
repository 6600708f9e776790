"""POST /reset_prefix_cache and GET /load, as in vLLM."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.access.metered import MeteredModels
from quire.server.http.openapi import JSON, responses
from quire.server.http.replies import json_response


class ServerLoad(Struct):
    server_load: int  # requests in flight that generate


class CacheReset(Struct):
    success: bool  # false: requests in flight still hold prefixes


class EngineRoutes:
    def __init__(self, models: MeteredModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        return [Route("/load", self.load), Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"])]

    @responses({JSON: ServerLoad})
    async def load(self, http: Request) -> Response:
        return json_response(ServerLoad(self._models.num_in_flight))

    @responses({JSON: CacheReset})
    async def reset_prefix_cache(self, http: Request) -> Response:
        """Clear the prefix cache of every loaded model that generates. A key resets what its own requests have
        cached."""
        empty = True
        for offer in self._models.offers():
            if offer.info is not None and offer.info.task == "generate" and not offer.adapter_of:
                service = (await self._models.find(offer.name)).service
                empty &= await service.reset_prefix_cache()
        return json_response(CacheReset(empty))

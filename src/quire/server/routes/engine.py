"""POST /reset_prefix_cache, GET /load and sleep mode, as in vLLM."""

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.client.sleep_mode import check_level, check_tags
from quire.server.access.metered import MeteredModels
from quire.server.http.openapi import JSON, query_parameters, responses
from quire.server.http.replies import json_response


class ServerLoad(Struct):
    server_load: int  # requests in flight that generate


class CacheReset(Struct):
    success: bool  # false: requests in flight still hold prefixes


class SleepState(Struct):
    is_sleeping: bool


class EngineRoutes:
    def __init__(self, models: MeteredModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        return [
            Route("/load", self.load),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]

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

    @query_parameters(level=Literal["1", "2"])
    @responses({"text/plain": str})
    async def sleep(self, http: Request) -> Response:
        """Answered when no engine runs."""
        check_level(http.query_params.get("level", "1"))
        await self._models.sleep()
        return Response(media_type="text/plain")

    @query_parameters(tags=list[Literal["weights", "kv_cache"]])
    @responses({"text/plain": str})
    async def wake_up(self, http: Request) -> Response:
        """Answered when requests are taken again."""
        check_tags(http.query_params.getlist("tags"))
        await self._models.wake_up()
        return Response(media_type="text/plain")

    @responses({JSON: SleepState})
    async def is_sleeping(self, http: Request) -> Response:
        return json_response(SleepState(self._models.state == "asleep"))

"""What SGLang's clients ask of the server: its model, its settings, its health, an empty cache."""

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.client.generate_request import GenerateRequest
from quire.core.params import SamplingParams
from quire.server.dialects.sglang.shapes import WIRE
from quire.server.http.openapi import JSON, responses
from quire.server.http.replies import Endpoint, json_response, with_wire_errors

if TYPE_CHECKING:
    from quire.client.service import Service
    from quire.server.app_state import AppState

HEALTH_SECONDS = 20.0  # until a server that generates nothing is not healthy

_FLUSHED = (
    "Cache flushed.\n",
    "Prefixes are in use: the cache was not flushed. Try again when no requests are in flight.\n",
)


def sglang_routes(state: "AppState") -> list[Route]:
    check: asyncio.Task[bool] | None = None  # of the health

    @responses({JSON: dict[str, Any]})
    async def model_info(http: Request) -> Response:
        service = (await state.models.find(None)).service
        return json_response(
            {
                "model_path": service.info.name,
                "tokenizer_path": service.info.name,
                "is_generation": service.info.task == "generate",
                "preferred_sampling_params": service.info.generation.as_dict() or None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    @responses({JSON: dict[str, Any]})
    async def server_info(http: Request) -> Response:
        info = (await state.models.find(None)).service.info
        return json_response(
            {
                "model_path": info.name,
                "tokenizer_path": info.name,
                "served_model_name": info.name,
                "context_length": info.max_model_len,
                "max_total_num_tokens": info.num_blocks * info.block_size,
                "page_size": info.block_size,
                "quantization": info.quantization,
                "kv_cache_dtype": info.kv_cache_dtype,
                "device": "cuda" if info.on_gpu else "cpu",
                "status": state.models.state,
                "internal_states": [{}],
                "version": __version__,
            }
        )

    @responses({"text/plain": str}, also=(400,))
    async def flush_cache(http: Request) -> Response:
        offers = [each for each in state.models.offers() if each.info is not None and not each.adapter_of]
        services = [(await state.models.find(each.name)).service for each in offers]
        empty = [await service.reset_prefix_cache() for service in services if service.info.task == "generate"]
        return Response(_FLUSHED[not all(empty)], 200 if all(empty) else 400, media_type="text/plain")

    @responses({"text/plain": str}, also=(503,))
    async def health_generate(http: Request) -> Response:
        nonlocal check
        if check is None or check.done():  # clients without a key may ask: all wait for one token
            check = asyncio.create_task(_is_healthy(state))
        return Response(status_code=200 if await asyncio.shield(check) else 503, media_type="text/plain")

    def route(path: str, endpoint: Endpoint, *methods: str) -> Route:
        return Route(path, with_wire_errors(endpoint, WIRE), methods=methods or ("GET",))

    return [
        route("/get_model_info", model_info),
        route("/model_info", model_info),
        route("/get_server_info", server_info),
        route("/server_info", server_info),
        route("/flush_cache", flush_cache, "POST"),
        route("/health_generate", health_generate),
    ]


async def _is_healthy(state: "AppState") -> bool:
    """Whether a token is generated in time. A model that is not loaded stays so."""
    if state.models.state != "ready":
        return False
    loaded = [each for each in state.models.offers() if each.info is not None and each.info.task == "generate"]
    return not loaded or await _generates((await state.models.find(loaded[0].name)).service)


async def _generates(service: "Service") -> bool:
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    request = GenerateRequest(id=f"health-{uuid4().hex[:8]}", params=params, prompt_ids=[0])
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            stream = await service.submit(request)
            try:
                async for event in stream:
                    if event.token_ids or event.finish_reason:
                        return event.error is None
            finally:
                await stream.aclose()
    except TimeoutError:
        pass
    return False

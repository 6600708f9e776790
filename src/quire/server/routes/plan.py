"""POST /plan: what `quire plan` says, for the page, beside what this server has."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.client.one_model import find_loaded
from quire.client.plan_request import PlanRequest
from quire.client.planner import Planner
from quire.core.errors import Unavailable
from quire.engine.options import QUANTIZE
from quire.runtime.available_memory import available_memory
from quire.server.app_state import AppState
from quire.server.http.body import read_json
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response

if TYPE_CHECKING:
    from quire.client.service import ModelInfo, Service

SNAPSHOT_SECONDS = 1.0  # to wait for an engine that is busy
MEMORY_SECONDS = 5.0  # how long what an engine takes is remembered
MEMORY_UNIT = 64 << 20  # bytes: free memory changes all the time, and a plan by less is the same plan

Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]


class PlanBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None  # one that is served and loaded; the first, where none is named
    shape: Annotated[str, Meta(max_length=64)] | None = None  # a well-known model instead of it
    format: Annotated[str, Meta(max_length=64)] | None = None  # of a shape's weights
    kv_cache_dtype: Literal["auto", "float16", "bfloat16", "float32", "int8", "fp8"] | None = None
    hardware: Annotated[str, Meta(max_length=64)] | None = None  # this machine, where none is named
    tp: Annotated[int, Meta(ge=1, le=1024)] | None = None
    users: Annotated[int, Meta(ge=1, le=1 << 17)] | None = None
    context: Tokens | None = None  # tokens of a user at most; prompt and output, where it is not given
    prompt: Tokens | None = None
    output: Tokens | None = None
    loras: Annotated[int, Meta(ge=0, le=1024)] | None = None
    rank: Annotated[int, Meta(ge=1, le=1024)] | None = None
    price: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # dollars an hour of one device


class ServedMemory(Struct, kw_only=True):
    """The memory that the engine of a served model has, in bytes."""

    name: str
    weights: int
    kv_cache: int  # the whole pool
    kv_bytes_per_token: float
    cache_tokens: int
    context: int  # of one request at most
    resident: int  # main memory of the engine process; 0: it did not say in time, or its weights are on a GPU


class PlanReply(Struct, kw_only=True):
    served: ServedMemory | None  # None: it is not loaded
    plan: dict[str, Any]  # as `quire plan --json` prints it, with `explain`, `note` and the `known` names


_decoder = msgspec.json.Decoder(PlanBody)


class PlanRoutes:
    def __init__(self, state: AppState) -> None:
        self._models, self._limit = state.models, state.options.max_body_bytes
        self._planner = Planner()
        self._resident: dict[str, tuple[float, int]] = {}  # model -> when it was asked, bytes

    def routes(self) -> list[Route]:
        return [Route("/plan", self.plan, methods=["POST"])]

    @request_body(PlanBody)
    @responses({JSON: PlanReply})
    async def plan(self, http: Request) -> Response:
        body = await read_json(http, self._limit, _decoder)
        service = await self._service(body)
        served = _served(service.info, await self._resident_bytes(service)) if service else None
        request = _request(body, service.info if service else None, _machine_memory(served))
        plan = await self._planner.plan(request)
        return json_response({"served": served, "plan": msgspec.Raw(plan)}, headers={"cache-control": "no-store"})

    async def _service(self, body: PlanBody) -> "Service | None":
        """A shape can be planned while no model is loaded."""
        try:
            return (await find_loaded(self._models, body.model)).service
        except Unavailable:
            if body.shape is None:
                raise
            return None

    async def _resident_bytes(self, service: "Service") -> int:
        if service.info.on_gpu:
            return 0
        name, now = service.info.name, time.monotonic()
        asked, resident = self._resident.get(name, (-MEMORY_SECONDS, 0))
        if now - asked >= MEMORY_SECONDS:
            async with service.watch() as viewer:
                snapshot = await viewer.next(SNAPSHOT_SECONDS)
            resident = snapshot.resident_bytes if snapshot else resident
            self._resident[name] = now, resident
        return resident


def _served(info: "ModelInfo", resident: int) -> ServedMemory:
    return ServedMemory(
        name=info.name,
        weights=info.weight_bytes,
        kv_cache=info.cache_bytes,
        kv_bytes_per_token=info.cache_bytes / max(1, info.num_blocks * info.block_size),
        cache_tokens=info.num_blocks * info.block_size,
        context=info.max_model_len,
        resident=resident,
    )


def _machine_memory(served: ServedMemory | None) -> int:
    """What a model in the place of the served one could take: free memory, and what that one takes."""
    taken = (served.resident or served.weights) if served else 0
    return (available_memory() + taken) // MEMORY_UNIT * MEMORY_UNIT


def _request(body: PlanBody, info: "ModelInfo | None", machine_memory: int) -> PlanRequest:
    """A served model is planned as it is served, unless something else is asked for."""
    served = info if body.shape is None else None
    prompt, output = body.prompt or 1024, body.output or 256
    return PlanRequest(
        name=served.name if served else "",
        path=served.path if served else "",
        shape=body.shape,
        format=body.format,
        quantization=served.quantization if served and served.quantization in QUANTIZE else None,
        kv_cache_dtype=body.kv_cache_dtype or (served.kv_cache_dtype if served else "auto"),
        block_size=served.block_size if served else 16,
        hardware=body.hardware,
        on_gpu=info is not None and info.on_gpu,
        machine_memory=0 if body.hardware else machine_memory,
        tp=body.tp or 1,
        users=body.users or 1,
        context=body.context or prompt + output,
        prompt=prompt,
        output=output,
        loras=body.loras or 0,
        rank=body.rank or 16,
        price=body.price,
    )

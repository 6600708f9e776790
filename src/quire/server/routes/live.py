"""GET /live: the state of the engine as server-sent events, as described in docs/page.md.

Events hold no text. Request ids are the server's own, shortened to their last letters."""

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.client.one_model import find_loaded
from quire.core.errors import QueueFull
from quire.core.records import RequestRecord
from quire.server.access.request_context import current_request_context
from quire.server.app_state import AppState
from quire.server.errors import ClientDisconnected, NotAllowed
from quire.server.http.event_stream import unless_disconnected
from quire.server.http.openapi import EVENTS, query_parameters, responses
from quire.server.observe.recent import Percentiles

if TYPE_CHECKING:
    from quire.client.service import Service
    from quire.core.snapshot import Snapshot

HEARTBEAT_SECONDS = 1.0  # between events while the engine is idle
MAX_VIEWERS = 16
LABEL_LENGTH = 8  # letters of a request's id that are shown
NUM_FINISHED_SHOWN = 32  # finished requests in the first event

_encode = msgspec.json.Encoder().encode


class LiveEvent(msgspec.Struct, kw_only=True):
    model: str
    state: str
    now: float  # time.monotonic(), as all times in here
    memory: dict[str, int]  # bytes
    tokens: dict[str, int]  # since the server started
    restarts: int
    latency: dict[str, Percentiles]  # seconds
    finished: list[dict[str, Any]]  # requests that ended since the last event
    engine: dict[str, Any] | None  # None: unchanged


class LiveRoutes:
    """Counts its viewers."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self.num_viewers = 0
        self._packed: dict[tuple[str, str], tuple[bytes, bytes]] = {}  # (model, map) -> raw, compressed

    def routes(self) -> list[Route]:
        return [Route("/live", self.view)]

    @query_parameters(model=str)
    @responses({EVENTS: LiveEvent})
    async def view(self, http: Request) -> Response:
        context = current_request_context()
        if context is not None and context.key is not None and not context.key.live:
            raise NotAllowed(f"key `{context.key.name}` may not use /live", "its entry needs `live: true`")
        if self.num_viewers >= MAX_VIEWERS:
            raise QueueFull(
                f"/live has {self.num_viewers} viewers, and {MAX_VIEWERS} are allowed", "try again later", retry_after=5
            )
        found = await find_loaded(self._state.models, http.query_params.get("model"))
        return _Events(self, found.service)

    async def events(self, service: "Service") -> AsyncGenerator[bytes, None]:
        recent = self._state.metrics.of(service.info.name).recent
        num_seen = recent.num_finished - NUM_FINISHED_SHOWN
        self.num_viewers += 1
        try:
            async with service.watch() as viewer:
                while self._state.models.state not in ("draining", "stopped"):  # a shutdown does not wait for viewers
                    snapshot = await viewer.next(HEARTBEAT_SECONDS)
                    if viewer.ended:
                        return
                    finished, num_seen = recent.since(num_seen), recent.num_finished
                    yield b"data: " + _encode(self._event(service, snapshot, finished)) + b"\n\n"
        finally:
            self.num_viewers -= 1

    def _event(self, service: "Service", snapshot: "Snapshot | None", finished: list[RequestRecord]) -> LiveEvent:
        info = service.info
        metrics = self._state.metrics.of(info.name)
        return LiveEvent(
            model=info.name,
            state=service.state,
            now=time.monotonic(),
            memory={"weights": info.weight_bytes, "cache": info.cache_bytes},
            tokens={"prompt": metrics.prompt_tokens, "generation": metrics.generation_tokens},
            restarts=metrics.restarts,
            latency=metrics.recent.latencies(),
            finished=[_finished(record) for record in finished],
            engine=self._engine(info.name, snapshot) if snapshot else None,
        )

    def _engine(self, model: str, snapshot: "Snapshot") -> dict[str, Any]:
        shown = _labelled(snapshot)
        for name in ("owners", "refs"):
            raw, packed = self._packed.get((model, name), (b"", b""))
            if raw is not shown[name]:  # compressed once for all viewers
                raw, packed = self._packed[model, name] = shown[name], zlib.compress(shown[name], 1)
            shown[name] = packed  # base64 in JSON
        return shown


class _Events(Response):
    def __init__(self, live: LiveRoutes, service: "Service") -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._live, self._service = live, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnected:
            return  # viewers end so
        except asyncio.CancelledError:  # the server stops
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._live.events(self._service)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _labelled(snapshot: "Snapshot") -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(snapshot, builtin_types=(bytes,))
    for view in shown["sequences"]:
        view["request_id"] = _label(view["request_id"])
    for step in shown["steps"]:
        step["preempted"] = [_label(request_id) for request_id in step["preempted"]]
        for chunk in step["chunks"]:
            chunk["request_id"] = _label(chunk["request_id"])
    return shown


def _finished(record: RequestRecord) -> dict[str, Any]:
    return {**msgspec.to_builtins(record), "id": _label(record.id)}


def _label(request_id: str) -> str:
    return request_id[-LABEL_LENGTH:]

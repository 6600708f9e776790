"""POST /api/pull: download a model, where the operator allows it, and serve it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.server.dialects.ollama.fields import bare_name
from quire.server.dialects.ollama.shapes import LINES, WIRE, line
from quire.server.errors import NotAllowed
from quire.server.http.body import read_json
from quire.server.http.event_stream import EventStream, unless_disconnected
from quire.server.http.openapi import JSON, request_body, responses
from quire.server.http.replies import json_response

if TYPE_CHECKING:
    from quire.client.service import PullProgress
    from quire.server.app_state import AppState


class ModelBody(Struct):
    model: str | None = None
    name: str | None = None  # the older name of `model`
    stream: bool | None = None

    @property
    def wanted(self) -> str:
        if not (name := self.model or self.name):
            raise BadRequest("model is required", param="model")
        return bare_name(name)


decoder = msgspec.json.Decoder(ModelBody)


class OllamaPullProgress(Struct):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET  # bytes
    completed: int | UnsetType = UNSET


class PullRoute:
    def __init__(self, state: "AppState") -> None:
        self._models, self._options = state.models, state.options

    @request_body(ModelBody)
    @responses({JSON: OllamaPullProgress, LINES: OllamaPullProgress})
    async def pull(self, http: Request) -> Response:
        body = await read_json(http, self._options.max_body_bytes, decoder, json_only=False)
        known = {offer.name for offer in self._models.offers()}
        if body.wanted not in known and not self._options.allow_pull:
            hint = "its operator can allow it with --allow-pull"
            raise NotAllowed(f"`{body.wanted}` is not here, and this server downloads no models", hint)
        lines = _progress_lines(self._models.pull(body.wanted))
        if body.stream is False:
            await unless_disconnected(http.receive, _exhaust(lines))
            return json_response(OllamaPullProgress("success"))
        return EventStream(WIRE, lines, 0.0)


async def _progress_lines(pull: AsyncGenerator["PullProgress", None]) -> AsyncGenerator[bytes, None]:
    """With Ollama's statuses: its clients show a progress bar for each digest."""
    yield line(OllamaPullProgress("pulling manifest"))
    async with aclosing(pull):
        async for progress in pull:
            if progress.total:
                digest = f"sha256:{progress.sha256}" if progress.sha256 else UNSET
                what = f"pulling {progress.sha256[:12] or 'files'}"
                yield line(OllamaPullProgress(what, digest, progress.total, progress.done))
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield line(OllamaPullProgress(status))


async def _exhaust(lines: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(lines):
        async for _ in lines:
            pass

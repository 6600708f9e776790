"""What can be asked about the server: its models, its health, its metrics, its version."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.client.one_model import unknown_model
from quire.server.access.resumption import RESUME_HEADER
from quire.server.app_state import AppState
from quire.server.http.openapi import JSON, responses
from quire.server.http.replies import json_response

if TYPE_CHECKING:
    from quire.client.service import ServedModel


class ModelCard(Struct, kw_only=True):
    """The fields of OpenAI and vLLM, and those of Anthropic: `type`, `display_name`, `created_at` and
    `max_input_tokens`."""

    id: str
    object: str = "model"
    created: int  # seconds since 1970
    type: str = "model"
    display_name: str
    created_at: str
    owned_by: str = "quire"
    root: str
    parent: str | None
    max_model_len: int | None
    max_input_tokens: int | None
    task: str | None
    default_sampling_params: dict[str, Any] | None  # of requests that leave them out: what the model advises


class ModelList(Struct):
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


class ServerStatus(Struct):
    status: str


class ServerVersion(Struct):
    version: str


class InfoRoutes:
    def __init__(self, state: AppState) -> None:
        self._models = state.models
        self._metrics = state.metrics
        self._created = datetime.now(UTC)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/models", self.models),  # this one and /v1/health as in llama-server
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/ping", self.health),  # SageMaker's name for it
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
        ]

    @responses({JSON: ModelList})
    async def models(self, http: Request) -> Response:
        cards = list(map(self._card, self._models.offers()))
        names: list[str | None] = [card.id for card in cards] or [None]
        return json_response(ModelList(cards, names[0], names[-1]))

    @responses({JSON: ModelCard})
    async def model(self, http: Request) -> Response:
        name, served = http.path_params["name"], {model.name: model for model in self._models.offers()}
        if name not in served:
            raise unknown_model(name, list(served))
        return json_response(self._card(served[name]))

    def _card(self, model: "ServedModel") -> ModelCard:
        return ModelCard(
            id=model.name,
            created=int(self._created.timestamp()),
            display_name=model.name,
            created_at=self._created.isoformat(timespec="seconds"),
            root=model.adapter_of or model.name,
            parent=model.adapter_of or None,
            max_model_len=model.info.max_model_len if model.info else None,
            max_input_tokens=model.info.max_model_len if model.info else None,
            task=model.info.task if model.info else None,
            default_sampling_params=model.info.generation.as_dict() if model.info else None,
        )

    @responses({JSON: ServerStatus}, also=(503,))
    async def health(self, http: Request) -> Response:
        state = self._models.state
        return json_response(ServerStatus(state), 503 if state in ("stalled", "stopped") else 200)

    @responses({JSON: ServerStatus}, also=(503,))
    async def ready(self, http: Request) -> Response:
        state = self._models.state
        return json_response(ServerStatus(state), 200 if state == "ready" else 503, {RESUME_HEADER: "1"})

    @responses({"text/plain": str})
    async def metrics(self, http: Request) -> Response:
        from quire.server.observe.exposition import MEDIA_TYPE, prometheus_text

        return Response(prometheus_text(self._metrics), media_type=MEDIA_TYPE)

    @responses({JSON: ServerVersion})
    async def version(self, http: Request) -> Response:
        return json_response(ServerVersion(__version__))

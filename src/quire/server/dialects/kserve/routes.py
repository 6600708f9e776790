"""What a server of the Open Inference Protocol tells about itself and its models."""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.client.one_model import unknown_model
from quire.server.dialects.kserve.shapes import (
    MODEL_VERSION,
    WIRE,
    ModelMetadata,
    ModelNames,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorMetadata,
)
from quire.server.http.openapi import JSON, responses
from quire.server.http.replies import json_response, with_wire_errors

if TYPE_CHECKING:
    from quire.client.service import ServedModel
    from quire.server.app_state import AppState

MODEL = "/v2/models/{model:path}"
VERSION = f"{MODEL}/versions/{MODEL_VERSION}"
EXTENSIONS = ["generate"]
INPUTS = [
    TensorMetadata("text_input", "BYTES", [-1]),
    TensorMetadata("sampling_parameters", "BYTES", [1]),  # JSON; optional
]
OUTPUTS = [TensorMetadata("text_output", "BYTES", [-1])]


def kserve_routes(state: "AppState") -> list[Route]:
    def find(http: Request) -> "ServedModel":
        """Asking about a model does not load it."""
        name, served = http.path_params["model"], {model.name: model for model in state.models.offers()}
        if name not in served:
            raise unknown_model(name, list(served))
        return served[name]

    @responses({JSON: ServerMetadata})
    async def server(http: Request) -> Response:
        return json_response(ServerMetadata("quire", __version__, EXTENSIONS))

    @responses({JSON: ServerLive}, also=(503,))
    async def live(http: Request) -> Response:
        alive = state.models.state != "stopped"
        return json_response(ServerLive(alive), 200 if alive else 503)

    @responses({JSON: ServerReady}, also=(503,))
    async def ready(http: Request) -> Response:
        is_ready = state.models.state == "ready"
        return json_response(ServerReady(is_ready), 200 if is_ready else 503)

    @responses({JSON: ModelNames})
    async def models(http: Request) -> Response:
        return json_response(ModelNames([model.name for model in state.models.offers()]))

    @responses({JSON: ModelMetadata})
    async def model(http: Request) -> Response:
        name = find(http).name
        return json_response(
            ModelMetadata(name=name, versions=[MODEL_VERSION], platform="quire", inputs=INPUTS, outputs=OUTPUTS)
        )

    @responses({JSON: ModelReady}, also=(503,))
    async def model_ready(http: Request) -> Response:
        """A model that its first request will load is ready for requests."""
        name, is_ready = find(http).name, state.models.state == "ready"
        return json_response(ModelReady(name, is_ready), 200 if is_ready else 503)

    endpoints = {
        "/v2": server,
        "/v2/health/live": live,
        "/v2/health/ready": ready,
        "/v2/models": models,
        f"{VERSION}/ready": model_ready,
        f"{MODEL}/ready": model_ready,
        VERSION: model,
        MODEL: model,
    }
    return [Route(path, with_wire_errors(endpoint, WIRE)) for path, endpoint in endpoints.items()]

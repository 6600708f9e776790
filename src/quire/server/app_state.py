"""What all routes of a server share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions

if TYPE_CHECKING:
    from quire.client.service import Models


@dataclass(frozen=True, slots=True)
class AppState:
    models: "Models"
    options: ServerOptions
    metrics: Metrics

"""An engine and the HTTP server in front of it, from options to the last request."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any

from quire.engine.client import EngineClient
from quire.engine.models import OneModel
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions


def launch(engine: EngineOptions, server: ServerOptions, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Returns after SIGTERM or SIGINT, once what was under way is done. `on_ready` is told the address."""
    _run(_main(engine, server, on_ready))


async def _main(engine: EngineOptions, server: ServerOptions, on_ready: Callable[[str], None] | None) -> None:
    client = EngineClient(engine)
    starting = asyncio.create_task(client.start())
    await asyncio.to_thread(import_module, "quire.server.serve")  # while the engine loads the model
    from quire.server.metrics import Metrics
    from quire.server.serve import serve

    metrics = Metrics()
    try:
        await starting
        client.observer = metrics.of(client.info.name)
        await serve(OneModel(client), server, metrics=metrics, on_ready=on_ready)
    finally:
        await client.stop()


def _run(main: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)

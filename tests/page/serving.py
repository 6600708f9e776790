"""The whole server, engine process and all, on a socket; its event loop runs in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from quire.engine.client import EngineClient
from quire.engine.models import OneModel
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.doors import bind, listen
from quire.server.metrics import Metrics
from quire.server.options import ServerOptions


@dataclass
class Served:
    url: str
    engine: EngineClient
    http: httpx.Client

    @property
    def num_viewers(self) -> int:
        return len(self.engine._viewers)


@contextmanager
def served(model: Path, options: ServerOptions | None = None, **engine: int) -> Iterator[Served]:
    options = options or ServerOptions()
    metrics, listener = Metrics(), listen(bind("127.0.0.1", 0))
    # One thread: a team of them spins, and is at the mercy of whatever else runs on the machine; a browser does.
    client = EngineClient(EngineOptions(model=str(model), **{"threads": 1, **engine}))
    ready = threading.Event()
    config = uvicorn.Config(
        create_app(OneModel(client), options, metrics),
        root_path=options.root_path,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)

    async def main() -> None:
        async with client:
            client.observer = metrics.of(client.info.name)
            ready.set()
            await server.serve([listener])

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=30) as http:
            yield Served(url, client, http)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()

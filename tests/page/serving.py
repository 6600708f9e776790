"""The whole server, engine process and all, on a socket; its event loop runs in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from quire.client.engine_client import EngineClient
from quire.client.many_models import ManyModels
from quire.client.one_model import OneModel
from quire.client.service import Models
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.http.tcp_socket import bind, listen
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions


@dataclass
class Served:
    url: str
    http: httpx.Client
    models: Models

    @property
    def engine(self) -> EngineClient:
        """Where there is one model."""
        assert isinstance(self.models, OneModel) and isinstance(self.models._service, EngineClient)
        return self.models._service

    @property
    def num_viewers(self) -> int:
        return len(self.engine._live_clients)


@contextmanager
def served(model: Path, options: ServerOptions | None = None) -> Iterator[Served]:
    """One model."""
    metrics, client = Metrics(), EngineClient(_options(model))

    @asynccontextmanager
    async def started() -> AsyncIterator[None]:
        async with client:
            client.observer = metrics.of(client.info.name)
            yield

    with _served(OneModel(client, client.adapters), started(), options or ServerOptions(), metrics) as served:
        yield served


@contextmanager
def served_many(
    model: Path, names: list[str], max_loaded: int, options: ServerOptions | None = None
) -> Iterator[Served]:
    """One model under several names, each with an engine of its own."""
    metrics = Metrics()
    models = ManyModels({name: _options(model, served_model_name=name) for name in names}, max_loaded, metrics.of)
    with _served(models, models, options or ServerOptions(), metrics) as served:
        yield served


def _options(model: Path, **more: str) -> EngineOptions:
    """One thread: a team of them spins, and is at the mercy of whatever else runs on the machine; a browser does."""
    return EngineOptions(model=str(model), threads=1, **more)


@contextmanager
def _served(
    models: Models, started: AbstractAsyncContextManager[object], options: ServerOptions, metrics: Metrics
) -> Iterator[Served]:
    listener, ready = listen(bind("127.0.0.1", 0)), threading.Event()
    config = uvicorn.Config(
        create_app(models, options, metrics), lifespan="off", ws="none", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)

    async def main() -> None:
        async with started:
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
            yield Served(url, http, models)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)

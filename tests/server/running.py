"""The application on a real socket, in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from quire.client.one_model import OneModel
from quire.server.app import create_app
from quire.server.http.tcp_socket import bind, listen
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.serve import configuration
from server.fake_service import FakeService


@dataclass
class Running:
    service: FakeService
    metrics: Metrics
    port: int
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, **body: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hello", **body})

    def chat(self, content: object = "Hello", **body: object) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **body})


@contextmanager
def running(options: ServerOptions | None = None) -> Iterator[Running]:
    service, metrics = FakeService(), Metrics()
    options = options or ServerOptions()
    listener = listen(bind("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = configuration(create_app(OneModel(service), options, metrics), options, metrics)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield Running(service, metrics, port, http)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()

"""Runs the application on a socket until a signal comes, then lets the requests in flight finish."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette

from quire.server.app import create_app
from quire.server.heap import TRIM_SECONDS, trim
from quire.server.http.connection import Connection, ConnectionLimits
from quire.server.http.listen import Listener, open_listener, reload
from quire.server.http.tcp_socket import listen
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.ray_registration import RayRegistration

if TYPE_CHECKING:
    from quire.client.service import Models


log = logging.getLogger("quire.server")

TICK_SECONDS = 0.1  # between two calls of `on_tick`
GC_THRESHOLD = 20_000  # new objects: as many as a hundred requests in flight have, and closed ones leave none
CANCEL_TIMEOUT_SECONDS = 1.0  # for sending errors to the clients of cancelled requests


async def serve(
    models: "Models",
    options: ServerOptions,
    *,
    metrics: Metrics | None = None,
    listener: Listener | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Returns after SIGTERM or SIGINT, once the requests in flight have ended or `drain_timeout` is over.

    `on_ready` gets the address once connections are accepted. Run it with `uvloop.run` where there is one."""
    listener, metrics = listener or open_listener(options), metrics or Metrics()
    config = configuration(create_app(models, options, metrics, listener.keys), options, metrics)
    config.load()
    if (options.keys_file or config.ssl) and hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload, listener, options, config.ssl)
    listen(listener.bound)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # `on_ready` tells that it listens
    registrations: list[RayRegistration] = []

    def ready(address: str) -> None:
        if options.ray_discovery:
            registrations.append(RayRegistration(address))
        if on_ready is not None:
            on_ready(address)

    server = _Server(config, models, options.drain_timeout, ready)
    try:
        await server.serve([listener.bound])
    finally:
        listener.close()
        for registration in registrations:
            await registration.close()


def configuration(app: Starlette, options: ServerOptions, metrics: Metrics) -> uvicorn.Config:
    limits = ConnectionLimits(options.max_connections, options.receive_timeout, options.send_timeout)
    connection: Any = partial(Connection, limits, partial(metrics.http, "none"))
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # RequestMiddleware writes one that says more
        server_header=False,
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=options.forwarded_allow_ips,
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        timeout_keep_alive=options.keep_alive,
    )


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        models: "Models",
        drain_timeout: float,
        on_ready: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._models = models
        self._drain_timeout = drain_timeout
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._forced = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # what is here stays: looking through it for garbage holds all streams up
        gc.set_threshold(GC_THRESHOLD)
        self._on_ready(self._address(sockets))

    async def on_tick(self, counter: int) -> bool:
        if counter % int(TRIM_SECONDS / TICK_SECONDS) == 0:
            self._loop.run_in_executor(None, trim)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections. The engine and the connections drain side by side, within the same time."""
        draining = asyncio.create_task(self._models.drain())
        closing = asyncio.create_task(super().shutdown(sockets))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({closing, forced}, timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        await _cancel({draining, closing, forced, *self.server_state.tasks})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second cancels. Neither is raised again: draining is a normal exit."""
        if self.should_exit:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._forced.set)
        elif num_left := len(self.server_state.tasks):
            log.info(
                "%d requests in flight have %g s to end (a second signal cancels them)",
                num_left,
                self._drain_timeout,
            )
        self.should_exit = True

    def _address(self, sockets: list[socket.socket] | None) -> str:
        assert sockets, "it listens on the socket it was given"
        if sockets[0].family == socket.AF_UNIX:
            return f"unix:{sockets[0].getsockname()}"
        host, port = sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_SECONDS)

"""Runs the application on a socket until a signal comes, then lets the requests under way finish."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from quire.core.errors import QuireError
from quire.server.app import create_app
from quire.server.keys import KeyRing
from quire.server.metrics import Metrics
from quire.server.options import ServerOptions

if TYPE_CHECKING:
    from quire.engine.service import Models


BACKLOG = 2048  # connections that may wait to be accepted
LAST_WORDS = 1.0  # seconds for telling the clients of cancelled requests


class CannotListen(QuireError):
    code = "cannot_listen"


async def serve(
    models: "Models",
    options: ServerOptions,
    *,
    metrics: Metrics | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Returns when it has ended: after SIGTERM or SIGINT, once what was under way is done or `drain_timeout` is over.

    `on_ready` is told the address as soon as connections are taken. Run it with `uvloop.run` where there is one."""
    keys = KeyRing(options.api_key, options.keys_file)
    listener = None if options.uds else listen(options.host, options.port)
    if options.keys_file and hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
    config = uvicorn.Config(
        create_app(models, options, metrics, keys),
        uds=options.uds,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # ours says more
        server_header=False,
        proxy_headers=False,
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        timeout_keep_alive=options.keep_alive,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its good news are told by `on_ready`
    await _Server(config, models, options.drain_timeout, on_ready).serve([listener] if listener else None)


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        models: "Models",
        drain_timeout: float,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        super().__init__(config)
        self._models = models
        self._drain_timeout = drain_timeout
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._forced = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self._address(sockets))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new connections; the engine and the connections finish side by side, within the same time."""
        draining = asyncio.create_task(self._models.drain())
        closing = asyncio.create_task(super().shutdown(sockets))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({closing, forced}, timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        await _cancel({draining, closing, forced, *self.server_state.tasks})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second does not wait. Neither is raised again: draining is a good end."""
        if self.should_exit:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._forced.set)
        self.should_exit = True

    def _address(self, sockets: list[socket.socket] | None) -> str:
        if not sockets:
            return f"unix:{self.config.uds}"
        host, port = sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=LAST_WORDS)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that says it is TCP: only then does asyncio send a small write, such as a token, at once and
    not up to 40 ms later."""
    listener = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # 127.0.0.1 for localhost
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another `--host` or `--port`"
        ) from error

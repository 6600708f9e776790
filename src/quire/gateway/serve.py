"""Runs the gateway on its two listeners until a signal comes, then lets requests in flight end."""

import asyncio
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack

from quire.core.errors import QuireError
from quire.gateway.admin import Admin
from quire.gateway.client_connection import Answering, ClientConnection, ConnectionBounds
from quire.gateway.config import LOOPBACK, GatewayConfig, server_tls
from quire.gateway.gateway import Gateway
from quire.gateway.intake import Intake
from quire.gateway.wire import ClientRequest
from quire.server.http.tcp_socket import BACKLOG, CannotListen, allow_open_files, bind, listen

log = logging.getLogger("quire.gateway")

MAX_BODIES = 16  # of the largest size, that all requests in flight may hold together
NUM_ADMIN_CONNECTIONS = 64
FIRST_CHECKS_SECONDS = 2.0  # that the start waits for the first checks of the workers

Handle = Callable[[ClientConnection, ClientRequest], Answering | None]


async def serve_gateway(
    config: GatewayConfig,
    *,
    reload: Callable[[], GatewayConfig] | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Returns after SIGTERM or SIGINT, once requests in flight have ended or `drain_timeout` is over.

    `on_ready` gets the addresses of both listeners; `reload` reads the configuration again, on SIGHUP."""
    sockets = _listening_sockets(config)
    gateway = Gateway(config)
    if config.host not in LOOPBACK and not config.keys:
        log.warning("there are no keys: every client that reaches %s:%d can use all models", config.host, config.port)
    stopping, forced = asyncio.Event(), asyncio.Event()
    _on_signals(gateway, stopping, forced, reload)
    bounds = _bounds(config, config.max_connections)
    servers = [
        await _listen(gateway, sockets[0], Intake(gateway).handle, bounds, server_tls(config)),
        await _listen(gateway, sockets[1], Admin(gateway).handle, _bounds(config, NUM_ADMIN_CONNECTIONS)),
    ]
    try:
        async with asyncio.timeout(FIRST_CHECKS_SECONDS):
            await gateway.fleet.first_checks()
    except TimeoutError:
        log.warning("some workers have not answered yet")
    if on_ready is not None:
        scheme = "https" if config.ssl_certfile else "http"
        on_ready(_address(sockets[0], scheme), _address(sockets[1], "http"))
    gc.freeze()  # what is here stays: looking through it for garbage holds all requests up
    await stopping.wait()
    await _drain(gateway, servers[0], bounds, forced)
    servers[1].close()
    await gateway.close()


def _listening_sockets(config: GatewayConfig) -> list[socket.socket]:
    """The sockets of both listeners. They listen at once: two can be bound to one port, and only one of them can
    listen."""
    places = [("", config.host, config.port), ("admin-", config.admin_host, config.admin_port)]
    sockets = []
    with ExitStack() as opened:
        for prefix, host, port in places:
            try:
                sockets.append(listen(opened.enter_context(bind(host, port))))
            except CannotListen as error:
                hint = f"choose another `--{prefix}host` or `--{prefix}port`"
                raise CannotListen(error.message, hint) from None
        opened.pop_all()
    return sockets


def _bounds(config: GatewayConfig, max_connections: int) -> ConnectionBounds:
    return ConnectionBounds(
        max_connections=max_connections,
        max_body_bytes=config.max_body_bytes,
        max_bodies_bytes=MAX_BODIES * config.max_body_bytes,
        receive_timeout=config.receive_timeout,
        send_timeout=config.send_timeout,
        keep_alive=config.keep_alive,
    )


async def _listen(
    gateway: Gateway,
    bound: socket.socket,
    handle: Handle,
    bounds: ConnectionBounds,
    tls: ssl.SSLContext | None = None,
) -> asyncio.Server:
    def refused(error: QuireError) -> None:
        gateway.metrics.refused(error.code)

    return await gateway.loop.create_server(
        lambda: ClientConnection(handle, bounds, refused), sock=bound, backlog=BACKLOG, ssl=tls
    )


def _on_signals(
    gateway: Gateway, stopping: asyncio.Event, forced: asyncio.Event, reload: Callable[[], GatewayConfig] | None
) -> None:
    """The first signal drains, the second does not wait."""

    def stop() -> None:
        forced.set() if stopping.is_set() else stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        gateway.loop.add_signal_handler(number, stop)
    if reload is not None:
        gateway.loop.add_signal_handler(signal.SIGHUP, _reload, gateway, reload)


def _reload(gateway: Gateway, read: Callable[[], GatewayConfig]) -> None:
    try:
        gateway.reconfigure(read())
    except QuireError as error:
        log.error("the configuration stays as it was: %s", error)
        gateway.reopen_audit()  # the file may have been moved away
    else:
        log.info("the configuration was read again")


async def _drain(gateway: Gateway, server: asyncio.Server, bounds: ConnectionBounds, forced: asyncio.Event) -> None:
    """Accept nothing new; wait for requests in flight; close what is left."""
    server.close()
    gateway.draining = bounds.draining = True
    for connection in list(bounds.connections):
        connection.close_if_idle()
    end = gateway.loop.time() + gateway.config.drain_timeout
    while bounds.connections and gateway.loop.time() < end and not forced.is_set():
        await asyncio.sleep(0.01)
    for connection in list(bounds.connections):
        connection.abort()
    await asyncio.sleep(0)


def _address(bound: socket.socket, scheme: str) -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_gateway(
    config: GatewayConfig,
    *,
    reload: Callable[[], GatewayConfig] | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    import uvloop

    allow_open_files()
    uvloop.run(serve_gateway(config, reload=reload, on_ready=on_ready))

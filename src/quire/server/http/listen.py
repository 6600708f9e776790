"""The address, the keys and the certificate of the server. Mistakes in them are found before a model is loaded."""

import logging
import socket
import ssl
from dataclasses import dataclass

from quire.core.errors import BadRequest, QuireError
from quire.server.access.keys import KeyRing
from quire.server.http.tcp_socket import CannotListen, bind
from quire.server.http.unix_socket import BoundFile, bind_unix
from quire.server.options import ServerOptions

log = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class Listener:
    keys: KeyRing
    bound: socket.socket  # not listening yet
    file: BoundFile | None = None  # of a unix socket

    def close(self) -> None:
        self.bound.close()
        if self.file is not None:
            self.file.remove()


def open_listener(options: ServerOptions) -> Listener:
    if options.ssl_certfile:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), options)
    keys = KeyRing(options.api_key, options.keys_file)
    if options.uds:
        bound = _bind_unix(options.uds)
        return Listener(keys, bound, BoundFile(options.uds))
    return Listener(keys, bind(options.host, options.port))


def _bind_unix(path: str) -> socket.socket:
    try:
        return bind_unix(path)
    except OSError as error:
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}", "choose another `--uds`") from error


def load_certificate(context: ssl.SSLContext, options: ServerOptions) -> None:
    """New connections use it."""
    assert options.ssl_certfile is not None
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " and ".join(file for file in (options.ssl_certfile, options.ssl_keyfile) if file)
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadRequest(f"cannot use {files} for TLS: {why}", "both are PEM files", param="ssl_certfile") from error


def _no_password() -> str:
    """Without this, OpenSSL would ask the terminal."""
    raise ValueError("the private key is encrypted")


def reload(listener: Listener, options: ServerOptions, context: ssl.SSLContext | None) -> None:
    """Read keys and certificate again. If one is wrong, the server keeps what it has."""
    listener.keys.reload()
    if context is None:
        return
    try:
        load_certificate(context, options)
    except QuireError as error:
        log.error("the certificate was not reloaded: %s", error)
    else:
        log.info("certificate reloaded from %s", options.ssl_certfile)

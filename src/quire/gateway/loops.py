"""Requests that come back: a gateway whose workers lead to itself, alone or through other gateways."""

import os

from quire.core.errors import QuireError
from quire.gateway.wire import ClientRequest

# What this process is called in the Via headers of what it sends.
OWN_NAME = b"quire-" + os.urandom(8).hex().encode()
OWN_HOP = b"1.1 " + OWN_NAME


class LoopDetected(QuireError):
    status, code = 508, "loop_detected"


def via(request: ClientRequest) -> bytes:
    """The proxies that a request has passed, this one the last of them."""
    if b"via" not in request.named:
        return OWN_HOP
    given = [value for name, value in request.headers if name == b"via"]
    return b", ".join([*given, OWN_HOP])


def check_loop(request: ClientRequest) -> None:
    """Raises LoopDetected."""
    if b"via" in request.named and any(name == b"via" and OWN_NAME in value for name, value in request.headers):
        raise LoopDetected("a worker of this gateway leads back to it", "name engines as workers, not this gateway")

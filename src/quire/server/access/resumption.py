"""A stream that goes on at another server when the first one dies: a gateway sends what the second one needs.

The request of the client comes in a wrapper, with the id, the time and the seed of the answer, and with the tokens that
were delivered. After each event the server tells the gateway its tokens, in a comment."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import BadRequest

RESUME_HEADER = "x-quire-resume"  # of a request: its body is a wrapper; of a response: tokens are told
MAX_EVENTS = 1 << 20


class Resumption(Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]  # of the answer
    created: Annotated[int, Meta(ge=0, le=2**53)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # of a request that names none
    events: Annotated[list[list[int]], Meta(max_length=MAX_EVENTS)] = []  # delivered tokens, as events had them


class ResumableBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The wrapper."""

    resume: Resumption
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(ResumableBody)


def unwrap(wrapped: bytes) -> tuple[bytes, Resumption]:
    """-> the body of the client, and where its answer goes on"""
    try:
        given = _decoder.decode(wrapped)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"the header {RESUME_HEADER} needs another body: {error}", "only gateways send it") from None
    if not all(given.resume.events):
        raise BadRequest("an event has no tokens", param="resume.events")
    return bytes(given.body), given.resume


def delivered(tokens: list[int]) -> bytes:
    """The comment behind an event."""
    return b": quire %b\n\n" % ",".join(map(str, tokens)).encode()

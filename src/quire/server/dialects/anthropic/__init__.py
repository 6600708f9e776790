"""Anthropic's Messages API."""

from quire.server.dialects.anthropic.call import parse_messages
from quire.server.dialects.anthropic.routes import anthropic_routes
from quire.server.dialects.anthropic.shapes import WIRE
from quire.server.dialects.dialect import Dialect

DIALECT = Dialect(
    name="anthropic",
    parsers={"/v1/messages": parse_messages},
    wire=WIRE,
    path_prefix="/v1/messages",
    routes=anthropic_routes,
)

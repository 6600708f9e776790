"""Anthropic's Messages API."""

from quire.server.dialects.anthropic.call import parse_messages
from quire.server.dialects.anthropic.routes import anthropic_routes
from quire.server.dialects.anthropic.shapes import error_body, error_status, sse
from quire.server.dialects.dialect import Dialect

DIALECT = Dialect(
    name="anthropic",
    routes={"/v1/messages": parse_messages},
    error=error_body,
    status=error_status,
    frame=sse,
    pages=anthropic_routes,
    below="/v1/messages",
)

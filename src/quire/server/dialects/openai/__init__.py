"""The API of OpenAI, with the extra fields that users of vLLM know."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.openai.adapters import AdapterRoutes
from quire.server.dialects.openai.chat import parse_chat
from quire.server.dialects.openai.completions import parse_completion
from quire.server.dialects.openai.invocations import parse_invocation
from quire.server.dialects.openai.responses.routes import ResponseRoutes
from quire.server.dialects.openai.shapes import error_body, sse

DIALECT = Dialect(
    name="openai",
    routes={
        "/v1/chat/completions": parse_chat,
        "/v1/completions": parse_completion,
        "/invocations": parse_invocation,
    },
    error=error_body,
    frame=sse,
    last=b"data: [DONE]\n\n",
    pages=lambda state: [*ResponseRoutes(state).routes(), *AdapterRoutes(state).routes()],
    idle=b": keep-alive\n\n",
)

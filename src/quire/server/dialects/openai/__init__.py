"""The API of OpenAI, with the extra fields of vLLM."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.openai.adapters import AdapterRoutes
from quire.server.dialects.openai.chat import parse_chat
from quire.server.dialects.openai.completions import parse_completion
from quire.server.dialects.openai.invocations import parse_invocation
from quire.server.dialects.openai.responses.routes import ResponseRoutes
from quire.server.dialects.openai.shapes import WIRE

DIALECT = Dialect(
    name="openai",
    parsers={
        "/v1/chat/completions": parse_chat,
        "/chat/completions": parse_chat,  # as in llama-server
        "/v1/completions": parse_completion,
        "/invocations": parse_invocation,
    },
    wire=WIRE,
    routes=lambda state: [*ResponseRoutes(state).routes(), *AdapterRoutes(state).routes()],
)

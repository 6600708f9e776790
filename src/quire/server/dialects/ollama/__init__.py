"""The API of Ollama: an answer is a line of JSON for each piece of it."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.ollama.call import parse_chat, parse_generate
from quire.server.dialects.ollama.fields import model_name
from quire.server.dialects.ollama.routes import ollama_routes
from quire.server.dialects.ollama.shapes import LINES, error_body, error_status, line

DIALECT = Dialect(
    name="ollama",
    routes={"/api/generate": parse_generate, "/api/chat": parse_chat},
    error=error_body,
    status=error_status,
    model=model_name,
    frame=line,
    media_type=LINES,
    json_only=False,
    pages=ollama_routes,
    below="/api/",
)

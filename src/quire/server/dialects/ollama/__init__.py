"""The API of Ollama: a stream is a line of JSON for each delta."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.ollama.call import parse_chat, parse_generate
from quire.server.dialects.ollama.fields import model_name
from quire.server.dialects.ollama.routes import ollama_routes
from quire.server.dialects.ollama.shapes import WIRE

DIALECT = Dialect(
    name="ollama",
    parsers={"/api/generate": parse_generate, "/api/chat": parse_chat},
    wire=WIRE,
    model=model_name,
    json_only=False,
    path_prefix="/api/",
    routes=ollama_routes,
)

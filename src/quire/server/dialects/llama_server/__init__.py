"""The API of llama-server (llama.cpp), beside OpenAI's. Its /tokenize and /detokenize are with vLLM's."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.llama_server.call import parse_completion, parse_infill
from quire.server.dialects.llama_server.routes import llama_server_routes
from quire.server.dialects.llama_server.shapes import WIRE

DIALECT = Dialect(
    name="llama_server",
    parsers={"/completion": parse_completion, "/infill": parse_infill},
    wire=WIRE,
    routes=llama_server_routes,
)

"""The API of Text Generation Inference. Its chat is OpenAI's. Its /tokenize is not served: that path is vLLM's."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.tgi.call import parse_either, parse_generate, parse_generate_stream
from quire.server.dialects.tgi.fields import adapter_id
from quire.server.dialects.tgi.routes import tgi_routes
from quire.server.dialects.tgi.shapes import WIRE

DIALECT = Dialect(
    name="tgi",
    parsers={"/": parse_either, "/generate": parse_generate, "/generate_stream": parse_generate_stream},
    wire=WIRE,
    model=adapter_id,
    routes=tgi_routes,
)

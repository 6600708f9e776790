"""The API of Text Generation Inference. Its chat is OpenAI's; its /tokenize is not here: vLLM's is."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.tgi.call import parse_either, parse_generate, parse_generate_stream
from quire.server.dialects.tgi.fields import adapter_id
from quire.server.dialects.tgi.routes import tgi_routes
from quire.server.dialects.tgi.shapes import error_body, error_status, sse

DIALECT = Dialect(
    name="tgi",
    routes={"/": parse_either, "/generate": parse_generate, "/generate_stream": parse_generate_stream},
    error=error_body,
    status=error_status,
    model=adapter_id,
    frame=sse,
    pages=tgi_routes,
)

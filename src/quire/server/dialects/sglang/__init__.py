"""SGLang's native API. Its /generate has the path of Text Generation Inference's, and other bodies."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.sglang.call import parse_generate
from quire.server.dialects.sglang.fields import has_sglang_prompt, lora_path
from quire.server.dialects.sglang.routes import sglang_routes
from quire.server.dialects.sglang.shapes import WIRE

DIALECT = Dialect(
    name="sglang",
    parsers={"/generate": parse_generate},
    claims=has_sglang_prompt,
    wire=WIRE,
    model=lora_path,
    routes=sglang_routes,
)

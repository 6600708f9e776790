"""KServe's Open Inference Protocol, version 2, with Triton's generate extension. The path names the model."""

from quire.server.dialects.dialect import Dialect
from quire.server.dialects.kserve.call import parse_generate, parse_generate_stream, parse_infer
from quire.server.dialects.kserve.routes import MODEL, VERSION, kserve_routes
from quire.server.dialects.kserve.shapes import WIRE

_PARSERS = {"generate": parse_generate, "generate_stream": parse_generate_stream, "infer": parse_infer}

DIALECT = Dialect(
    name="kserve",
    # A version's path comes first: a model's name may have slashes.
    parsers={f"{path}/{verb}": parse for path in (VERSION, MODEL) for verb, parse in _PARSERS.items()},
    wire=WIRE,
    json_only=False,
    path_prefix="/v2/models",
    routes=kserve_routes,
)

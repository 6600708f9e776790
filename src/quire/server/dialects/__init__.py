"""The APIs that are served. Each dialect is a package with a `DIALECT`; modules beside them are shared."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.dialects.dialect import Dialect

DIALECTS = {
    "openai": "quire.server.dialects.openai",
    "tgi": "quire.server.dialects.tgi",
    "ollama": "quire.server.dialects.ollama",
    "anthropic": "quire.server.dialects.anthropic",
    "llama_server": "quire.server.dialects.llama_server",
    "kserve": "quire.server.dialects.kserve",
}


def load(name: str) -> "Dialect":
    dialect: Dialect = import_module(DIALECTS[name]).DIALECT
    return dialect

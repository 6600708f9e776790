"""The dialects that are served. Each is a module with a `DIALECT`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.dialects.dialect import Dialect

DIALECTS = {
    "openai": "quire.server.dialects.openai",
    "tgi": "quire.server.dialects.tgi",
    "ollama": "quire.server.dialects.ollama",
    "anthropic": "quire.server.dialects.anthropic",
}


def load(name: str) -> "Dialect":
    dialect: Dialect = import_module(DIALECTS[name]).DIALECT
    return dialect

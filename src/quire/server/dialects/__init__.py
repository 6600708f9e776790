"""The APIs that are served. Each dialect is a package with a `DIALECT`; modules beside them are shared."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.server.dialects.dialect import Dialect, Reader

DIALECTS = {
    "openai": "quire.server.dialects.openai",
    "sglang": "quire.server.dialects.sglang",
    "tgi": "quire.server.dialects.tgi",
    "ollama": "quire.server.dialects.ollama",
    "anthropic": "quire.server.dialects.anthropic",
    "llama_server": "quire.server.dialects.llama_server",
    "kserve": "quire.server.dialects.kserve",
}


def load(name: str) -> "Dialect":
    dialect: Dialect = import_module(DIALECTS[name]).DIALECT
    return dialect


def readers() -> "dict[str, list[Reader]]":
    """Path -> the dialects that read bodies posted there, with their parsers."""
    by_path: dict[str, list[Reader]] = {}
    for dialect in map(load, DIALECTS):
        for path, parse in dialect.parsers.items():
            by_path.setdefault(path, []).append((dialect, parse))
    return by_path


def reader_of(body: bytes, several: "Sequence[Reader]") -> "Reader":
    """The first that claims the body, or else the last."""
    return next((reader for reader in several[:-1] if reader[0].claims(body)), several[-1])

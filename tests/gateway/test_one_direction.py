"""The gateway's files can be read from the intake on."""

import ast
from pathlib import Path

import quire.gateway

FOLDER = Path(quire.gateway.__file__).parent
PREFIX = "quire.gateway."


def test_reading_begins_at_intake() -> None:
    graph = {path.stem: _imports(path) for path in FOLDER.glob("*.py")}
    assert {"exchange", "gateway", "attempt", "exchange_record"} <= _reached(graph, "intake")


def _imports(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {node.module.removeprefix(PREFIX) for node in nodes if node.module and node.module.startswith(PREFIX)}


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, open_names = set[str](), [start]
    while open_names:
        fresh = graph.get(open_names.pop(), set()) - reached
        reached |= fresh
        open_names += fresh
    return reached

"""The rules of the house: imports point downward only, and each floor knows only what it may know."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import quire

ROOT = Path(quire.__file__).parent

# Top to bottom, as in docs/architecture.md. A floor imports itself and what stands after it.
FLOORS = ["cli", "gateway", "server", "train", "api", "client", "engine", "hub", "quantize", "text", "planning"]
FLOORS += ["executors", "runtime", "models", "weights", "ops", "ipc", "core"]

STDLIB_ONLY = {"core"}
NO_ARRAYS = {"gateway", "server", "cli"}  # they know text and HTTP
GATEWAY_IMPORTS = ("gateway", "core", "server.access", "server.errors", "server.http.tcp_socket")
GATEWAY_IMPORTS += ("server.http.json_size", "server.observe", "server.prompt_reader")
TORCH_ALLOWED = {"ops/reference", "ops/gpu", "quantize/gpu", "train"}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Of a module and all that it defines, without their expressions, which are most of a tree."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


@cache
def imports(path: Path) -> list[str]:
    names = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which floor they reach"
            names.append(node.module or "")
    return names


def python_files() -> Iterator[tuple[Path, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path, path.relative_to(ROOT).as_posix()


def test_imports_point_downward() -> None:
    wrong = []
    for path, name in python_files():
        floor = name.split("/")[0]
        if floor not in FLOORS:
            continue  # quire/__init__.py looks names up lazily
        for module in imports(path):
            parts = module.split(".")
            if (
                parts[0] == "quire"
                and len(parts) > 1
                and parts[1] in FLOORS
                and FLOORS.index(parts[1]) < FLOORS.index(floor)
            ):
                wrong.append(f"{name} imports {module}: {floor} stands below {parts[1]}")
    assert not wrong, "\n".join(wrong)


def test_core_imports_the_standard_library_only() -> None:
    import sys

    wrong = []
    for path, name in python_files():
        if name.split("/")[0] in STDLIB_ONLY:
            for module in imports(path):
                top = module.split(".")[0]
                if top != "quire" and top not in sys.stdlib_module_names:
                    wrong.append(f"{name} imports {module}: core may import only the standard library")
    assert not wrong, "\n".join(wrong)


def test_the_gateway_knows_no_engine() -> None:
    """It passes bytes on: what it shares with the server are keys, quotas, sockets and logs."""
    wrong = [
        f"{name} imports {module}: the gateway may import {', '.join(GATEWAY_IMPORTS)}"
        for path, name in python_files()
        for module in imports(path)
        if name.startswith("gateway/")
        and module.startswith("quire.")
        and not module.removeprefix("quire.").startswith(GATEWAY_IMPORTS)
    ]
    assert not wrong, "\n".join(wrong)


def test_servers_see_no_arrays_and_only_one_backend_knows_torch() -> None:
    wrong = []
    for path, name in python_files():
        for module in imports(path):
            top = module.split(".")[0]
            if top == "numpy" and name.split("/")[0] in NO_ARRAYS:
                wrong.append(f"{name} imports numpy: {name.split('/')[0]} knows text and HTTP, no arrays")
            if top in ("torch", "triton") and not any(name.startswith(place) for place in TORCH_ALLOWED):
                wrong.append(f"{name} imports {module}: only {', '.join(TORCH_ALLOWED)} may")
            if top == "pickle":
                wrong.append(f"{name} imports pickle: nothing is ever unpickled")
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_floor() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(FLOORS), f"not in the house: {sorted(folders - set(FLOORS))}"


def test_a_public_class_name_stands_in_one_file() -> None:
    files: dict[str, list[str]] = {}
    for path, name in python_files():
        for cls in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            files.setdefault(cls, []).append(name)
    shared = {cls: where for cls, where in files.items() if len(where) > 1}
    assert not shared, f"class names that stand in several files: {shared}"


# Two classes that are one thing: a group is its sequences, and a sequence reads from its group what they share.
CIRCLES = {("core.sequence", "core.sequence_group")}


def test_no_file_imports_in_a_circle() -> None:
    """Nor for types alone, or inside a function: files can be read in one order. The package itself, whose public names
    are those of files below, is not counted."""
    files = {_module(name): path for path, name in python_files() if name != "__init__.py"}
    graph = {module: _imported(path) & files.keys() - {module} for module, path in files.items()}
    reached = {module: _reached(graph, module) for module in graph}
    circles = {tuple(sorted(other for other in reached[m] if m in reached[other])) for m in graph if m in reached[m]}
    assert circles - CIRCLES == set(), "these files import each other: break the circle, or defend it in CIRCLES"
    assert CIRCLES - circles == set(), "this circle is broken: take it out of CIRCLES"


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(path: Path) -> set[str]:
    """Modules of the package that a file names, and names that it takes from them, which may be modules."""
    taken = set[str]()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            taken |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            taken |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("quire.") for name in taken if name.startswith("quire.")}


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, open_names = set[str](), [start]
    while open_names:
        fresh = graph[open_names.pop()] - reached
        reached |= fresh
        open_names += fresh
    return reached

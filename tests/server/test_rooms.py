import ast
from pathlib import Path

from quire import server

ROOT = Path(server.__path__[0])

# Top to bottom. A room imports itself and what stands after it.
ROOMS = ["launch", "serve", "app", "batch", "routes", "dialects", "app_state", "http", "observe", "access"]
ROOMS += ["options", "errors", "heap", "ray_registration"]
DIALECTS = {path.name for path in (ROOT / "dialects").iterdir() if path.is_dir()}


def imported(path: Path) -> list[list[str]]:
    """Modules of the server that a file imports when it is loaded, as paths below the server."""
    tree = ast.parse(path.read_text())
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [name.split(".")[2:] for name in names if name.startswith("quire.server.")]


def test_rooms_import_downward_only() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        room = name.parts[0].removesuffix(".py")
        if room in ROOMS:
            below = ROOMS[ROOMS.index(room) :]
            wrong += [f"{name} imports {'.'.join(module)}" for module in imported(path) if module[0] not in below]
    assert not wrong, "\n".join(wrong)


def test_dialects_import_no_other_dialect() -> None:
    wrong = []
    for path in sorted((ROOT / "dialects").rglob("*.py")):
        name = path.relative_to(ROOT / "dialects")
        others = DIALECTS - {name.parts[0]}
        wrong += [
            f"{name} imports {'.'.join(module)}"
            for module in imported(path)
            if module[0] == "dialects" and others & {*module[1:2]}
        ]
    assert not wrong, "\n".join(wrong)

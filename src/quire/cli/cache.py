"""`quire cache`: what `--kv-disk-path` keeps on disk."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from string import hexdigits
from time import time

from quire.cli.parser import Parser, UsageError, nearest
from quire.core.block_keys import ABOUT_FILE, is_page_file, is_state_file
from quire.core.errors import BadRequest

ACTIONS = ("ls", "clear", "verify")
EXAMPLES = """\
  quire cache ls ~/.cache/quire/kv                what each model keeps there
  quire cache verify ~/.cache/quire/kv            read every block; damaged ones are removed
  quire cache clear ~/.cache/quire/kv             remove all
  quire cache clear ~/.cache/quire/kv 3f9c        remove one model's: the start of its fingerprint
  QUIRE_KV_DISK_PATH=/data/kv quire cache ls --json
"""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The KV blocks of one model and one type of cache, its states and its window pages."""

    fingerprint: str
    model: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    num_states: int  # checkpoints of recurrent layers
    num_pages: int  # window pages
    num_bytes: int
    last_used: float  # time.time()


def run(argv: Sequence[str]) -> int:
    parser = Parser("cache [ls|clear|verify] [DIR] [FINGERPRINT]", "Show, check or clear prefixes on disk.", EXAMPLES)
    parser.add_argument("action", nargs="?", default="ls", metavar="ls|clear|verify", help="what to do (default: ls)")
    parser.add_argument("path", nargs="?", metavar="DIR", help="the engines' --kv-disk-path (or QUIRE_KV_DISK_PATH)")
    parser.add_argument("fingerprint", nargs="?", default="", metavar="FINGERPRINT", help="of one model, or its start")
    parser.add_argument("--kv-disk-path", metavar="DIR", help="the same as DIR")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse(argv)
    if arguments.action not in ACTIONS:
        hint = nearest(arguments.action, ACTIONS) or f"use one of {', '.join(ACTIONS)}"
        raise UsageError(f"there is no `quire cache {arguments.action}`", hint)
    path, fingerprint = arguments.path, arguments.fingerprint
    if arguments.kv_disk_path:
        if fingerprint:
            raise UsageError(
                f"the directory is given twice: {path} and {arguments.kv_disk_path}", "leave one of them out"
            )
        path, fingerprint = arguments.kv_disk_path, path or ""
    root = _root(path)
    folders = [folder for folder in _folders(root) if folder.name.startswith(fingerprint)]
    if fingerprint and not folders:
        raise BadRequest(f"{root} has no model `{fingerprint}`", f"see `quire cache ls {root}`")
    result = {"ls": _list, "clear": _clear, "verify": _verify}[arguments.action](root, folders, not arguments.json)
    if arguments.json:
        print(json.dumps(result))
    return 1 if result.get("damaged") else 0


def _root(path: str | None) -> Path:
    path = path or os.environ.get("QUIRE_KV_DISK_PATH")
    if not path:
        raise UsageError("which directory?", "name the one that engines have as --kv-disk-path")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise BadRequest(f"there is no directory {root}", "name the one that engines have as --kv-disk-path")
    return root


def _folders(root: Path) -> list[Path]:
    """One for each model and type of cache that an engine has kept here."""
    return sorted(folder for folder in root.iterdir() if (folder / ABOUT_FILE).is_file() or _has_blocks(folder))


def _has_blocks(folder: Path) -> bool:
    """Whether a folder without a description holds the blocks of a model."""
    return all(digit in hexdigits for digit in folder.name) and any(folder.glob("*/*/*.kv"))


def _stored(folder: Path) -> StoredModel:
    about: dict[str, object] = {}
    with suppress(OSError, ValueError, TypeError):  # the description is for people; blocks do not need it
        about = dict(json.loads((folder / ABOUT_FILE).read_text()))
    sizes, used, num_states, num_pages = [], [folder.stat().st_mtime], 0, 0
    for file in folder.rglob("*.kv"):
        try:
            status = file.stat()
        except OSError:
            continue  # an engine has removed it
        num_states += is_state_file(file)
        num_pages += is_page_file(file)
        sizes.append(status.st_size)
        used.append(status.st_mtime)
    return StoredModel(
        folder.name,
        str(about.get("model", "?")),
        str(about.get("kv_cache_dtype", "?")),
        int(str(about.get("block_size", 0))),
        len(sizes) - num_states - num_pages,
        num_states,
        num_pages,
        sum(sizes),
        max(used),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _list(root: Path, folders: list[Path], show: bool) -> dict[str, object]:
    models, free = [_stored(folder) for folder in folders], shutil.disk_usage(root).free
    if show:
        for model in models:
            tokens = model.num_blocks * model.block_size
            hours = (time() - model.last_used) / 3600
            beside = f"{model.num_states:>6} states  " if model.num_states else ""
            beside += f"{model.num_pages:>6} window pages  " if model.num_pages else ""
            print(f"{model.fingerprint[:12]}  {_size(model.num_bytes):>10}  {tokens:>9} tokens  {beside}", end="")
            print(f"{model.kv_cache_dtype:<9} used {hours:.1f} h ago  {model.model}")
        print(f"{_size(sum(model.num_bytes for model in models))} in {root}, {_size(free)} free on its disk")
    return {"path": str(root), "free_bytes": free, "models": [asdict(model) for model in models]}


def _clear(root: Path, folders: list[Path], show: bool) -> dict[str, object]:
    num_bytes = 0
    for folder in folders:
        num_bytes += _stored(folder).num_bytes
        shutil.rmtree(folder, ignore_errors=True)  # an engine may be writing there
    if show:
        print(f"{_size(num_bytes)} removed from {root}")
    return {"path": str(root), "removed_bytes": num_bytes, "models": [folder.name for folder in folders]}


def _verify(root: Path, folders: list[Path], show: bool) -> dict[str, object]:
    from tqdm import tqdm

    from quire.runtime.kv_files import is_whole

    files = [file for folder in folders for file in folder.rglob("*.kv")]
    damaged, num_states, num_pages = [], sum(map(is_state_file, files)), sum(map(is_page_file, files))
    num_blocks = len(files) - num_states - num_pages
    for file in tqdm(files, desc="blocks", unit="block", leave=False, disable=not show or not sys.stderr.isatty()):
        if not is_whole(file) and file.exists():
            file.unlink(missing_ok=True)
            damaged.append(str(file))
    if show:
        for name in damaged:
            print(f"removed {name}: it is damaged")
        beside = f" and {num_states} states" if num_states else ""
        beside += f" and {num_pages} window pages" if num_pages else ""
        print(f"{num_blocks} blocks{beside} in {root}, {len(damaged)} damaged")
    return {
        "path": str(root),
        "num_blocks": num_blocks,
        "num_states": num_states,
        "num_pages": num_pages,
        "damaged": damaged,
    }

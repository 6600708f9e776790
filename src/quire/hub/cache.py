"""The directory of downloaded models: where it is, what it holds, and its write lock."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import QuireError
from quire.hub.aliases import ALIASES, WheelModel

_ALIAS_BY_FILE = {model.file_name: alias for alias, model in reversed(ALIASES.items()) if isinstance(model, WheelModel)}


class DownloadFailed(QuireError):
    """A source has the model, and the download failed."""

    status, code = 503, "download_failed"


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # for the command line
    path: Path
    num_bytes: int


def cache_dir() -> Path:
    """$QUIRE_CACHE, or $XDG_CACHE_HOME/quire, or ~/.cache/quire. It may not exist yet."""
    if given := os.environ.get("QUIRE_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # the XDG specification ignores an empty or relative path
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "quire"


def models_dir() -> Path:
    return cache_dir() / "models"


def make_models_dir() -> Path:
    """Create the directory if needed and check that it is writable."""
    directory = models_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise DownloadFailed(
            f"models cannot be kept in {directory}: {failure.strerror}",
            "set QUIRE_CACHE to a directory that can be written",
        ) from failure
    if not os.access(directory, os.W_OK):
        raise DownloadFailed(f"{directory} cannot be written", "set QUIRE_CACHE to a directory that can be written")
    return directory


def check_free_space(directory: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DownloadFailed(
            f"pulling {what} needs {needed / 1e6:.0f} MB in {directory}, and {free / 1e6:.0f} MB are free",
            "make room there; QUIRE_CACHE and HF_HOME say where models are kept",
        )


def directory_bytes(directory: Path) -> int:
    """The size of its files, which other processes may be writing: for each, the smaller of length and disk usage."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                file = (Path(folder) / name).stat()
            except FileNotFoundError:  # renamed meanwhile
                continue
            total += min(file.st_size, file.st_blocks * 512)  # a file may get its full length before its data
    return total


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Hold the directory's exclusive lock; other writers wait. The lock of a process that died is free."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another pull to end", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached_models() -> list[CachedModel]:
    """The models of this cache, then those of huggingface_hub's cache, by name."""
    files = sorted(models_dir().glob("*.gguf"))
    models = [CachedModel(_ALIAS_BY_FILE.get(file.name, str(file)), file, file.stat().st_size) for file in files]
    return [*models, *_hub_models()]


def hub_cache_dir() -> Path:
    """Where huggingface_hub keeps repositories; computed here so that listing them does not import it."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _hub_models() -> Iterator[CachedModel]:
    for repo in sorted(hub_cache_dir().glob("models--*")):
        name = repo.name.removeprefix("models--").replace("--", "/")
        files = [
            file
            for file in repo.glob("snapshots/*/*")
            if (file.suffix in (".safetensors", ".gguf") or file.match("pytorch_model*.bin")) and file.exists()
        ]
        sizes = {file.resolve(): file.stat().st_size for file in files}  # revisions share unchanged files
        if sizes:
            yield CachedModel(name, repo, sum(sizes.values()))

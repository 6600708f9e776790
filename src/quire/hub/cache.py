"""Where models are kept, which ones are there, and one writer at a time."""

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

_SHORT_NAMES = {model.file_name: alias for alias, model in reversed(ALIASES.items()) if isinstance(model, WheelModel)}


class DownloadFailed(QuireError):
    """A source knows the model and could not deliver it."""

    status, code = 503, "download_failed"


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # what to call it on the command line
    path: Path
    num_bytes: int


def cache_dir() -> Path:
    """$QUIRE_CACHE, or $XDG_CACHE_HOME/quire, or ~/.cache/quire. It need not exist."""
    if given := os.environ.get("QUIRE_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # an empty or relative one is to be ignored, says the specification
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "quire"


def models_dir() -> Path:
    return cache_dir() / "models"


def make_models_dir() -> Path:
    """The directory, writable; or an error that says which one to make so."""
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
    """That its files take on the disk, or of which they consist: the less. Others may be writing them."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                file = (Path(folder) / name).stat()
            except FileNotFoundError:  # it was renamed meanwhile
                continue
            total += min(file.st_size, file.st_blocks * 512)  # a file can be as long as it will be before it is written
    return total


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: others who want to write wait here. A lock whose holder died is free."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another pull to end", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached_models() -> list[CachedModel]:
    """Ours, then those of the Hugging Face hub's own cache, by name."""
    files = sorted(models_dir().glob("*.gguf"))
    ours = [CachedModel(_SHORT_NAMES.get(file.name, str(file)), file, file.stat().st_size) for file in files]
    return [*ours, *_hub_models()]


def hub_cache_dir() -> Path:
    """Where huggingface_hub keeps repositories; told here so that listing them does not import it."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _hub_models() -> Iterator[CachedModel]:
    for repo in sorted(hub_cache_dir().glob("models--*")):
        name = repo.name.removeprefix("models--").replace("--", "/")
        files = [
            file for file in repo.glob("snapshots/*/*") if file.suffix in (".safetensors", ".gguf") and file.exists()
        ]
        sizes = {file.resolve(): file.stat().st_size for file in files}  # revisions share what did not change
        if sizes:
            yield CachedModel(name, repo, sum(sizes.values()))

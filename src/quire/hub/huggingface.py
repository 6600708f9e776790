"""Models from the Hugging Face Hub, or from its cache on this machine if the hub cannot be reached.

huggingface_hub downloads, resumes and caches; it is imported only when a repository is asked for. What is small comes
first: a model that is not supported is refused before its weights are downloaded."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from quire.hub.cache import DownloadFailed, check_free_space, directory_bytes, hub_cache_dir
from quire.hub.progress import DownloadProgress
from quire.hub.repo_files import CONFIG_FILE, choose_files

_POLL_SECONDS = 0.2  # between two updates of the progress
_HEADER_BYTES = 1 << 16  # of a GGUF file, whose first keys say what it is
_HUB_TIMEOUT_SECONDS = 10.0  # then the local cache is used
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class RepoNotFound(DownloadFailed):
    """Neither the hub nor the local cache has the repository."""


def is_repo_id(name: str) -> bool:
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and not name.endswith((".", "-"))


def fetch_repo(repo: str, selector: str | None, revision: str | None, progress: DownloadProgress) -> Path:
    """The directory of the snapshot, or the GGUF file that `selector` names (the first split of several)."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    hub: Any = import_module("huggingface_hub")
    try:
        # Unlike a listing, the library does not retry this.
        info = hub.HfApi().model_info(repo, revision=revision, timeout=_HUB_TIMEOUT_SECONDS, files_metadata=True)
    except GatedRepoError as failure:
        raise DownloadFailed(
            f"{repo} asks its users to accept terms first",
            f"accept them at https://huggingface.co/{repo}, then run `hf auth login` or set HF_TOKEN",
        ) from failure
    except RevisionNotFoundError as failure:
        raise DownloadFailed(f"{repo} has no revision {revision}", "leave out --revision for the main one") from failure
    except RepositoryNotFoundError as failure:
        raise RepoNotFound(
            f"the hub has no repository {repo} that you may read",
            "check the spelling; for a private one run `hf auth login` or set HF_TOKEN",
        ) from failure
    except Exception as failure:  # the library raises the errors of its HTTP client
        return _from_cache(repo, selector, revision, failure)

    hub.utils.disable_progress_bars()
    wanted = choose_files([file.rfilename for file in info.siblings], selector, repo)
    files = [file for file in info.siblings if file.rfilename in wanted]
    missing = [file for file in files if not _is_cached(hub, repo, file.rfilename, info.sha)]
    with _report_progress(f"pulling {repo}", repo, missing, progress):
        if missing:
            _refuse_unsupported(hub, repo, wanted, info.sha)
        try:
            names = [_literal(file) for file in wanted]
            snapshot = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=names))
        except Exception as failure:
            raise DownloadFailed(
                f"the download of {repo} was interrupted: {_one_line(failure)}",
                "run the same command again to resume it",
            ) from failure
    for file in missing:
        _verify(snapshot / file.rfilename, _sha256_of(file))
    return _main_file(snapshot, wanted)


def _refuse_unsupported(hub: Any, repo: str, wanted: list[str], commit: str) -> None:
    """Raises what loading would raise, of the files that are small or of the beginning of a GGUF file."""
    from quire.hub.preflight import check_config, check_gguf

    if CONFIG_FILE not in wanted:
        check_gguf(f"{repo}/{wanted[0]}", _first_bytes(hub, repo, wanted[0], commit))
        return
    small = [file for file in wanted if PurePosixPath(file).name in (CONFIG_FILE, "modules.json")]
    try:
        snapshot = Path(hub.snapshot_download(repo, revision=commit, allow_patterns=[_literal(file) for file in small]))
    except Exception:  # the download that follows says why
        return
    check_config(snapshot)


def _first_bytes(hub: Any, repo: str, file: str, commit: str) -> bytes:
    """Nothing where they cannot be had; the download that follows says why."""
    with suppress(Exception):
        url = hub.hf_hub_url(repo, file, revision=commit)
        headers = {**hub.utils.build_hf_headers(), "Range": f"bytes=0-{_HEADER_BYTES - 1}"}
        response = hub.utils.get_session().get(url, headers=headers, timeout=_HUB_TIMEOUT_SECONDS)
        if response.status_code in (200, 206):
            return bytes(response.content)
    return b""


def _is_cached(hub: Any, repo: str, file: str, commit: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(repo, file, revision=commit), str)


def _cache_folder(repo: str) -> Path:
    return hub_cache_dir() / f"models--{repo.replace('/', '--')}"


@contextmanager
def _report_progress(what: str, repo: str, files: list[Any], progress: DownloadProgress) -> Iterator[None]:
    """Report progress from a thread, by the growth of the cache folder."""
    if not files:
        yield
        return
    folder, total = _cache_folder(repo), sum(file.size or 0 for file in files)
    folder.mkdir(parents=True, exist_ok=True)
    check_free_space(folder, total, repo)
    before, ended = directory_bytes(folder), threading.Event()
    with progress.track(what, total, _sha256_of(max(files, key=lambda file: file.size or 0))) as update:

        def report() -> None:
            while not ended.wait(_POLL_SECONDS):
                update(directory_bytes(folder) - before)

        thread = threading.Thread(target=report)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _sha256_of(file: Any) -> str:
    """Empty for small files, which are in git and not in LFS."""
    return file.lfs.sha256 if file.lfs is not None else ""


def _verify(path: Path, sha256: str) -> None:
    if not sha256:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise DownloadFailed(
            f"{path.name} has sha256 {digest}, and it should be {sha256}", "the file was removed; pull it again"
        )


def _from_cache(repo: str, selector: str | None, revision: str | None, why: Exception) -> Path:
    """The snapshot that was pulled before. huggingface_hub itself needs all files of a repository, or their names."""
    folder, name = _cache_folder(repo), revision or "main"
    branch = folder / "refs" / name
    snapshot = folder / "snapshots" / (branch.read_text().strip() if branch.is_file() else name)
    if not snapshot.is_dir():
        raise RepoNotFound(
            f"the hub cannot be reached ({_one_line(why)}), and {repo} is not in its cache on this machine",
            "check the network, and whether HF_HUB_OFFLINE is set",
        ) from why
    cached = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    return _main_file(snapshot, choose_files(cached, selector, repo))


def _main_file(snapshot: Path, wanted: list[str]) -> Path:
    return snapshot / wanted[0] if wanted[0].endswith(".gguf") else snapshot


def _literal(file: str) -> str:
    """The name as a glob pattern that matches nothing else."""
    return re.sub(r"([*?[])", r"[\1]", file)


def _one_line(failure: Exception) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]

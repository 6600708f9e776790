"""A model from the Hugging Face hub, or from the hub's cache on this machine when the hub cannot be reached.

Downloading, resuming and caching are huggingface_hub's work; it is imported only here, when a repository is asked for.
The choice of files is ours: never code, never pickles, never a second copy of the weights in another format."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from quire.core.errors import BadRequest
from quire.hub.cache import DownloadFailed, check_free_space, directory_bytes, hub_cache_dir
from quire.hub.progress import DownloadProgress

_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
_PATTERNS = (*_SETTINGS, "chat_template*", "added_tokens.json", "*.safetensors", "*.safetensors.index.json")
_SECOND_COPIES = ("consolidated*",)  # the same weights under the names of the vendor's own code
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_POLL = 0.2  # seconds between two looks at how much has come
_PATIENCE = 10.0  # seconds to wait for the hub before its cache here is used
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class RepoNotFound(DownloadFailed):
    """Neither the hub nor its cache here has the repository, as far as one can tell."""


def is_repo_id(name: str) -> bool:
    return _REPO.fullmatch(name) is not None and ".." not in name and not name.endswith((".", "-"))


def fetch(repo: str, selector: str | None, revision: str | None, progress: DownloadProgress) -> Path:
    """The snapshot's directory, or the GGUF file (of several parts, the first) that `selector` names."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    hub: Any = import_module("huggingface_hub")
    try:
        # Unlike a listing, this is tried only once.
        info = hub.HfApi().model_info(repo, revision=revision, timeout=_PATIENCE, files_metadata=True)
    except GatedRepoError as failure:
        raise DownloadFailed(
            f"{repo} asks its users to accept terms first",
            f"accept them at https://huggingface.co/{repo}, then run `hf auth login` or set HF_TOKEN",
        ) from failure
    except RevisionNotFoundError as failure:
        raise DownloadFailed(f"{repo} has no revision {revision}", "leave --revision out for its main one") from failure
    except RepositoryNotFoundError as failure:
        raise RepoNotFound(
            f"the hub has no repository {repo} that you may read",
            "check the spelling; for a private one run `hf auth login` or set HF_TOKEN",
        ) from failure
    except Exception as failure:  # whichever HTTP client the hub's library uses: a cached snapshot may do
        return _from_cache(repo, selector, revision, failure)

    hub.utils.disable_progress_bars()
    wanted = choose_files([file.rfilename for file in info.siblings], selector, repo)
    files = [file for file in info.siblings if file.rfilename in wanted]
    missing = [file for file in files if not _is_here(hub, repo, file.rfilename, info.sha)]
    with _told(f"pulling {repo}", repo, missing, progress):
        try:
            names = [_literal(file) for file in wanted]
            snapshot = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=names))
        except Exception as failure:
            raise DownloadFailed(
                f"the download of {repo} broke off: {_one_line(failure)}",
                "run the same command again: it goes on where it was",
            ) from failure
    for file in missing:
        _check(snapshot / file.rfilename, _sha256_of(file))
    return _main_file(snapshot, wanted)


def _is_here(hub: Any, repo: str, file: str, commit: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(repo, file, revision=commit), str)


def _folder(repo: str) -> Path:
    return hub_cache_dir() / f"models--{repo.replace('/', '--')}"


@contextmanager
def _told(what: str, repo: str, files: list[Any], progress: DownloadProgress) -> Iterator[None]:
    """Tells how much of `files` has come, again and again, from a thread: it is looked for where they come to."""
    if not files:
        yield
        return
    folder, total = _folder(repo), sum(file.size or 0 for file in files)
    folder.mkdir(parents=True, exist_ok=True)
    check_free_space(folder, total, repo)
    before, ended = directory_bytes(folder), threading.Event()
    with progress.of(what, total, _sha256_of(max(files, key=lambda file: file.size or 0))) as update:

        def tell() -> None:
            while not ended.wait(_POLL):
                update(directory_bytes(folder) - before)

        thread = threading.Thread(target=tell)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _sha256_of(file: Any) -> str:
    """Empty for small ones, which git itself has."""
    return file.lfs.sha256 if file.lfs is not None else ""


def _check(path: Path, sha256: str) -> None:
    if not sha256:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise DownloadFailed(
            f"{path.name} has sha256 {found}, and it should be {sha256}", "it was not kept; pull it again"
        )


def choose_files(files: list[str], selector: str | None, repo: str) -> list[str]:
    """The files of a repository to have. One GGUF model when a selector is given or when there is nothing else."""
    files = [file for file in files if _is_safe(file)]
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    if selector is not None:
        return _choose_gguf(ggufs, selector, repo)
    settings_and_weights = [file for file in files if _is_wanted(file)]
    if any(file.endswith(".safetensors") for file in settings_and_weights):
        return settings_and_weights
    models = [file for file in ggufs if not _is_later_part(file)]
    if len(models) == 1:
        return _parts(models[0], ggufs)
    if models:
        raise BadRequest(
            f"{repo} has {len(models)} GGUF models: {', '.join(models)}",
            f"pick one: `{repo}:{models[0]}`",
            param="model",
        )
    raise DownloadFailed(f"{repo} has neither safetensors nor GGUF files", "weights in other formats cannot be loaded")


def _choose_gguf(ggufs: list[str], selector: str, repo: str) -> list[str]:
    if selector in ggufs:
        return _parts(selector, ggufs)
    tag = re.compile(rf"(^|[-._/]){re.escape(selector.removesuffix('.gguf'))}([-._/]|$)", re.IGNORECASE)
    models = [file for file in ggufs if not _is_later_part(file) and tag.search(file.removesuffix(".gguf"))]
    if len(models) == 1:
        return _parts(models[0], ggufs)
    known = ", ".join(file for file in ggufs if not _is_later_part(file)) or "no GGUF files"
    problem = f"fits {len(models)} files ({', '.join(models)})" if models else "fits no file"
    raise BadRequest(f"`{selector}` {problem} of {repo}", f"it has {known}", param="model")


def _from_cache(repo: str, selector: str | None, revision: str | None, why: Exception) -> Path:
    """What of it was pulled before. The hub's library wants all files of a repository, or the names of some."""
    folder, name = _folder(repo), revision or "main"
    branch = folder / "refs" / name
    snapshot = folder / "snapshots" / (branch.read_text().strip() if branch.is_file() else name)
    if not snapshot.is_dir():
        raise RepoNotFound(
            f"the hub cannot be reached ({_one_line(why)}), and {repo} is not in its cache here",
            "check the network, and whether HF_HUB_OFFLINE is set",
        ) from why
    here = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    return _main_file(snapshot, choose_files(here, selector, repo))


def _main_file(snapshot: Path, wanted: list[str]) -> Path:
    return snapshot / wanted[0] if wanted[0].endswith(".gguf") else snapshot


def _parts(model: str, ggufs: list[str]) -> list[str]:
    """All parts of a model that was split, the first one first."""
    if not (part := _PART.search(model)):
        return [model]
    stem = model[: part.start()]
    return [file for file in ggufs if (other := _PART.search(file)) and file[: other.start()] == stem]


def _is_later_part(file: str) -> bool:
    part = _PART.search(file)
    return part is not None and int(part[1]) > 1


def _is_wanted(file: str) -> bool:
    """Of the top folder only: others hold the same model for other runtimes."""
    named = any(fnmatchcase(file, pattern) for pattern in _PATTERNS)
    return named and "/" not in file and not any(fnmatchcase(file, pattern) for pattern in _SECOND_COPIES)


def _is_safe(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in file


def _literal(file: str) -> str:
    """The name as a pattern that matches nothing else."""
    return re.sub(r"([*?[])", r"[\1]", file)


def _one_line(failure: Exception) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]

"""A repository of the hub as far as a plan needs it: its config.json, and of weights the names, shapes and types.

Files of weights have these at their beginning. That is fetched, and the rest of the file is a hole that takes no space,
so that what reads checkpoints reads it. Nothing is put into the hub's cache."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from quire.hub.aliases import ALIASES, WheelModel
from quire.hub.cache import DownloadFailed
from quire.hub.repo_files import CONFIG_FILE, choose_files

GGUF_HEADER_BYTES = 32 << 20  # more than the words of a tokenizer and the names of tensors take
MAX_HEADER_BYTES = 128 << 20  # of a safetensors file
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RemoteRepo:
    """Files that would be downloaded."""

    repo: str
    commit: str
    sizes: dict[str, int]  # by name
    hub: Any  # the library huggingface_hub

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def remote_repo(name: str) -> RemoteRepo | None:
    """The repository of a name whose files are not all here. None: they are, it is a path or a model of another source,
    or the hub says nothing of it: `resolve_model` says what is wrong."""
    alias, path = ALIASES.get(name.lower()), Path(name).expanduser()
    if isinstance(alias, WheelModel) or (name and path.exists()):
        return None
    from quire.hub.huggingface import is_repo_id

    repo, _, selector = (alias.repo, "", alias.selector) if alias else name.partition(":")
    if not is_repo_id(repo):
        return None
    hub: Any = import_module("huggingface_hub")
    import_module("huggingface_hub.utils")
    try:
        info = hub.HfApi().model_info(repo, timeout=TIMEOUT_SECONDS, files_metadata=True)
    except Exception:
        return None
    wanted = choose_files([file.rfilename for file in info.siblings], selector or None, repo)
    if all(isinstance(hub.try_to_load_from_cache(repo, file, revision=info.sha), str) for file in wanted):
        return None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings if file.rfilename in wanted}
    return RemoteRepo(repo, info.sha, sizes, hub)


def write_hollow(remote: RemoteRepo, folder: Path) -> Path:
    """-> what `resolve_model` would have: the folder, or the GGUF file (the first split of several)."""
    from quire.weights.formats import OLDER_FILES

    weights = [file for file in remote.sizes if file.endswith((".safetensors", ".gguf"))]
    if not weights:
        raise DownloadFailed(
            f"{remote.repo} has no safetensors or GGUF files, whose headers a plan would read",
            f"download it first: quire pull {remote.repo}",
        )
    settings = (CONFIG_FILE, *OLDER_FILES)
    small = [file for file in remote.sizes if PurePosixPath(file).name in settings or file.endswith(".index.json")]
    for file in [*small, *weights]:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as hollow:
            hollow.write(_beginning(remote, file))
            hollow.truncate(remote.sizes[file])
    return folder / sorted(weights)[0] if weights[0].endswith(".gguf") else folder


def _beginning(remote: RemoteRepo, file: str) -> bytes:
    """A header; all of a file that has none."""
    size = remote.sizes[file]
    if file.endswith(".gguf"):
        return _fetch(remote, file, min(size, GGUF_HEADER_BYTES))
    if not file.endswith(".safetensors"):
        return _fetch(remote, file, size)
    length = 8 + int.from_bytes(_fetch(remote, file, min(size, 8)), "little")
    if length > min(size, MAX_HEADER_BYTES):
        raise DownloadFailed(
            f"{remote.repo}: {file} is no safetensors file", "its first bytes are no length of a header"
        )
    return _fetch(remote, file, length)


def _fetch(remote: RemoteRepo, file: str, count: int) -> bytes:
    """The first bytes."""
    hub = remote.hub
    url = hub.hf_hub_url(remote.repo, file, revision=remote.commit)
    headers = {**hub.utils.build_hf_headers(), "Range": f"bytes=0-{count - 1}"}
    get: Callable[..., Any] = hub.utils.get_session().get
    try:
        response = get(url, headers=headers, timeout=TIMEOUT_SECONDS)
    except Exception as failure:  # of the library's HTTP client
        raise DownloadFailed(f"{remote.repo}: {file} cannot be read: {failure}", "try again") from failure
    if response.status_code != 206 and not (response.status_code == 200 and len(response.content) <= max(count, 1)):
        raise DownloadFailed(
            f"{remote.repo}: {file} cannot be read in part (HTTP {response.status_code})",
            f"download it first: quire pull {remote.repo}",
        )
    return bytes(response.content)

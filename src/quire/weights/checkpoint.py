"""A checkpoint, whatever its format: one view of names, tensors and configuration, in Hugging Face's words."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.core.errors import BadCheckpoint
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.splits import first_part

if TYPE_CHECKING:
    from quire.ops.tensors import StoredTensor


class Checkpoint(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> CheckpointConfig: ...

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they are stored."""

    def names(self) -> list[str]:
        """Hugging Face's names, such as "model.layers.0.self_attn.q_proj.weight", in the order of the files."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Known without reading the tensor."""

    def tensor(self, name: str) -> "StoredTensor":
        """A view of the file, of which nothing is read until it is looked at; or, where a format keeps codes and scales
        apart, blocks that are made of them now."""

    def forget(self) -> None:
        """What was read of the files is no longer counted as this process's memory. Reading it again is cheap while it
        is in the page cache."""


def find_checkpoint(path: Path) -> Path:
    """The .gguf file (the first of its parts), or the directory in Hugging Face's layout, that `path` means."""
    if not path.exists():
        raise BadCheckpoint(f"{path} does not exist")
    if not path.is_dir():
        return first_part(path)
    if (path / "config.json").exists():
        return path
    files = sorted({first_part(file) for file in path.glob("*.gguf")})
    if len(files) == 1:
        return files[0]
    if files:
        raise BadCheckpoint(
            f"{path} holds {len(files)} .gguf files: {', '.join(file.name for file in files)}", "name one"
        )
    raise BadCheckpoint(
        f"{path} holds neither config.json nor a .gguf file",
        "name a .gguf file or a directory in Hugging Face's layout",
    )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A .gguf file, a directory in Hugging Face's layout, or a directory with one .gguf file in it."""
    found = find_checkpoint(Path(path))
    if found.is_dir():
        from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(found)
    from quire.weights.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(found)

"""A checkpoint of any format: names, tensors and configuration under Hugging Face's names and keys."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.core.errors import BadCheckpoint
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.splits import first_split

if TYPE_CHECKING:
    from quire.ops.tensors import StoredTensor


class Checkpoint(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> CheckpointConfig: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""

    def names(self) -> list[str]:
        """Hugging Face's names, such as "model.layers.0.self_attn.q_proj.weight", in the order of the files."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Known without reading the tensor."""

    def tensor(self, name: str) -> "StoredTensor":
        """A view of the mapped file, or blocks that are built now where a format stores several tensors a weight."""

    def drop_pages(self) -> None:
        """Unmap the pages that were read: they no longer count as memory of this process. Reading them again is cheap
        while they are in the page cache."""


def find_checkpoint(path: Path) -> Path:
    """The .gguf file (the first of its splits) or the directory in Hugging Face's layout that `path` names."""
    if not path.exists():
        raise BadCheckpoint(f"{path} does not exist")
    if not path.is_dir():
        return first_split(path)
    if (path / "config.json").exists():
        return path
    files = sorted({first_split(file) for file in path.glob("*.gguf")})
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
    checkpoint = find_checkpoint(Path(path))
    if checkpoint.is_dir():
        from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(checkpoint)
    from quire.weights.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(checkpoint)

"""The base of checkpoints that change something of another one."""

from pathlib import Path
from typing import TYPE_CHECKING

from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

if TYPE_CHECKING:
    from quire.ops.tensors import StoredTensor


class DelegatingCheckpoint:
    """All that a subclass does not say is as in `checkpoint`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def config(self) -> CheckpointConfig:
        return self._checkpoint.config

    @property
    def nbytes(self) -> int:
        return self._checkpoint.nbytes

    def names(self) -> list[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def tensor(self, name: str) -> "StoredTensor":
        return self._checkpoint.tensor(name)

    def drop_pages(self) -> None:
        self._checkpoint.drop_pages()

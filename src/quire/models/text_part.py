"""Checkpoints whose tensors have other names than ours, such as the language model inside one that sees images."""

from collections.abc import Mapping
from pathlib import Path

from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}


class Renamed:
    """Some tensors of a checkpoint, under other names."""

    def __init__(self, whole: Checkpoint, names: Mapping[str, str]) -> None:
        self._whole, self._names = whole, names  # ours -> the checkpoint's

    @property
    def path(self) -> Path:
        return self._whole.path

    @property
    def config(self) -> CheckpointConfig:
        return self._whole.config

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(self._names[name])

    def tensor(self, name: str) -> StoredTensor:
        return self._whole.tensor(self._names[name])

    def forget(self) -> None:
        self._whole.forget()

    @classmethod
    def by_parts(cls, whole: Checkpoint, ours: Mapping[str, str]) -> "Renamed":
        """All of its tensors, with every part of a name replaced, in this order."""
        return cls(whole, {_replaced(name, ours): name for name in whole.names()})


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """Tensors under the names they have in a checkpoint of the language model alone. One that has nothing else stays as
    it is."""
    names = {
        ours + name.removeprefix(prefix): name
        for name in checkpoint.names()
        for prefix, ours in PREFIXES.items()
        if name.startswith(prefix)
    }
    return Renamed(checkpoint, names) if names else checkpoint

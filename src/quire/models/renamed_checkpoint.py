"""Checkpoints whose tensors have other names than the model file's."""

from collections.abc import Mapping

from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.delegating_checkpoint import DelegatingCheckpoint


class RenamedCheckpoint(DelegatingCheckpoint):
    """Some or all tensors of a checkpoint, under other names."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        super().__init__(checkpoint)
        self._names = names  # new name -> stored name

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._names[name])

    def tensor(self, name: str) -> StoredTensor:
        return self._checkpoint.tensor(self._names[name])

    @classmethod
    def by_substring(cls, checkpoint: Checkpoint, substitutions: Mapping[str, str]) -> Checkpoint:
        """All tensors, with the substitutions made in every name, in their order. (Without names it is a
        DummyCheckpoint, which has every tensor.)"""
        if not checkpoint.names():
            return checkpoint
        return cls(checkpoint, {_replaced(name, substitutions): name for name in checkpoint.names()})


def _replaced(name: str, substitutions: Mapping[str, str]) -> str:
    for old, new in substitutions.items():
        name = name.replace(old, new)
    return name

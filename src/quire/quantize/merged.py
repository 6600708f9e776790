"""A checkpoint with a LoRA adapter added to its linear layers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.ops.tensors import LoraDelta, StoredTensor, stored_floats
from quire.quantize.floats import read_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.delegating_checkpoint import DelegatingCheckpoint
from quire.weights.gguf.adapter import read_gguf_adapter
from quire.weights.peft import listed, read_adapter


class MergedCheckpoint(DelegatingCheckpoint):
    """Adapted weights are fp32; all others are as they were."""

    def __init__(self, checkpoint: Checkpoint, updates: Mapping[str, LoraDelta]) -> None:
        super().__init__(checkpoint)
        stored = set(checkpoint.names())
        if unknown := [layer for layer in updates if f"{layer}.weight" not in stored]:
            raise BadCheckpoint(
                f"{checkpoint.path} has no linear layers {listed(unknown)}", "the adapter belongs to another model"
            )
        self._updates = {f"{layer}.weight": update for layer, update in updates.items()}
        for name, update in self._updates.items():
            shape = (update.b.shape[0], update.a.shape[1])
            if checkpoint.shape(name) != shape:
                raise BadCheckpoint(
                    f"{name} is {[*checkpoint.shape(name)]}, and the adapter's {[*shape]}",
                    "the adapter belongs to another model",
                )

    def tensor(self, name: str) -> StoredTensor:
        tensor, update = self._checkpoint.tensor(name), self._updates.get(name)
        if update is None:
            return tensor
        product = read_floats(update.b) @ read_floats(update.a)
        return stored_floats(name, read_floats(tensor) + np.float32(update.scale) * product)


def merged(checkpoint: Checkpoint, adapter: Path) -> MergedCheckpoint:
    if adapter.is_dir():
        return MergedCheckpoint(checkpoint, read_adapter(adapter))
    keys = ("num_attention_heads", "num_key_value_heads")
    heads = {key: checkpoint.config.int(key, checkpoint.config.int(keys[0])) for key in keys}
    return MergedCheckpoint(checkpoint, read_gguf_adapter(adapter, heads))

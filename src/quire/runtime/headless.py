"""A decoder without its head: a wrapper around the op set lets every family's forward pass return hidden states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.models.loading import LoadedModel
from quire.models.registry import Family, read_model_config
from quire.ops.opset import Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.weights.checkpoint import Checkpoint


class Headless:
    """An op set, except that the head is not loaded and `logits` returns the hidden states of its rows."""

    def __init__(self, ops: Any, vocab: int) -> None:
        self._ops, self._vocab = ops, vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        rows = sum(part.num_rows for part in parts)
        if keep and rows == self._vocab:  # the head
            return PackedWeight(rows, parts[0].num_columns, 0, None)
        packed: PackedWeight = self._ops.pack(parts, bias, keep)
        return packed

    def logits(self, x: Value, head: PackedWeight, batch: Any, softcap: float = 0.0, vocabulary: Any = None) -> Value:
        return self._ops.rows(x, batch)


def load_headless(ops: OpSet, family: Family, checkpoint: Checkpoint, max_model_len: int) -> LoadedModel:
    """A decoder whose forward pass returns the hidden states of rows after the last norm."""
    config = read_model_config(family, checkpoint.config)
    model = family.load(Headless(ops, config.vocab), checkpoint, config, max_model_len)

    def forward(ops: OpSet, batch: Any) -> Value:
        return model.forward(Headless(ops, config.vocab), batch)

    return replace(model, forward=forward)

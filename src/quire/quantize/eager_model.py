"""A checkpoint as a function from token sequences to logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.models.registry import family, read_model_config
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.quantize.eager_ops import (
    EagerBatch,
    EagerLogits,
    EagerOps,
    LinearUse,
    MatmulHook,
    OutputProbe,
    StoredWeights,
)
from quire.quantize.floats import Floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.shapes import shapes_of


class EagerModel:
    """`max_length`: tokens of the longest sequence. `hook` sees every matmul, `probe` may change its outputs."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_length: int,
        hook: MatmulHook | None = None,
        probe: OutputProbe | None = None,
    ) -> None:
        model_family = family(checkpoint.config.architecture)
        config = read_model_config(model_family, checkpoint.config)
        ops: Any = EagerOps(hook, probe, shared_layers(config))
        self._model = model_family.load(ops, checkpoint, config, min(max_length, config.max_length))
        self._ops = ops

    def __call__(self, sequences: Sequence[Sequence[int]], hook: MatmulHook | None = None) -> EagerLogits:
        """`hook`: in place of the model's, for passes that run side by side."""
        logits = self._model.forward(self._ops.for_pass(hook), EagerBatch.of(sequences))
        assert isinstance(logits, EagerLogits)
        return logits

    @property
    def kv_largest(self) -> dict[int, tuple[float, float]]:
        """The largest magnitudes of keys and of values so far, by layer."""
        largest: dict[int, tuple[float, float]] = self._ops.kv_largest
        return largest


def shared_layers(config: Any) -> frozenset[int]:
    """Layers whose keys and values other layers read, in Gemma 3n and 4."""
    return frozenset(source for layer, source in enumerate(getattr(config, "sources", ())) if source != layer)


def linear_layers(checkpoint: Checkpoint) -> dict[str, LinearUse]:
    """The linear layers of the model, by the name of their stored weight."""
    ops: Any = EagerOps()
    model_family = family(checkpoint.config.architecture)
    model_family.load(ops, shapes_of(checkpoint), read_model_config(model_family, checkpoint.config), 1)
    return {use.name: use for use in ops.linears}


class _SumTrace(EagerOps):
    """Ops that compute with zeros, and note the matrices whose outputs are added to the stream before them."""

    def __init__(self, shared: frozenset[int]) -> None:
        super().__init__(StoredWeights(_zeros), shared=shared)
        self.names: set[str] = set()
        self._last: tuple[Floats, Floats | None, str] | None = None  # output, stream before it, name

    def linear(self, x: Floats, w: PackedWeight) -> Floats:
        stream = self._sources.stream
        out = super().linear(x, w)
        self._last = (out, stream, w.packed[0].name) if len(w.packed) == 1 else None
        return out

    def add(self, x: Floats, y: Floats) -> Floats:
        if self._last is not None:
            out, stream, name = self._last
            if (x is stream and y is out) or (y is stream and x is out):
                self.names.add(name)
        return super().add(x, y)


def _zeros(tensor: StoredTensor) -> Floats:
    return np.zeros((tensor.num_rows, tensor.num_columns), np.float32)


def layers_of_stream(checkpoint: Checkpoint) -> frozenset[str]:
    """The linear layers whose outputs are added to the stream as they are, by the name of their stored weight: where
    one makes up for an error of the stream, the layers after it get the right input."""
    model_family = family(checkpoint.config.architecture)
    config = read_model_config(model_family, checkpoint.config)
    ops: Any = _SumTrace(shared_layers(config))
    model = model_family.load(ops, checkpoint, config, 1)
    with np.errstate(all="ignore"):
        model.forward(ops, EagerBatch.of([[0]]))
    return frozenset(ops.names)

"""A checkpoint as a function from token sequences to logits."""

from collections.abc import Callable, Sequence
from typing import Any

from quire.models.registry import family, read_model_config
from quire.quantize.eager_ops import EagerBatch, EagerLogits, EagerOps, LinearUse, MatmulHook
from quire.weights.checkpoint import Checkpoint


def eager_forward(
    checkpoint: Checkpoint, max_length: int, hook: MatmulHook | None = None
) -> Callable[[Sequence[Sequence[int]]], EagerLogits]:
    """`max_length`: tokens of the longest sequence. `hook` sees every matmul."""
    ops: Any = EagerOps(hook)
    model_family = family(checkpoint.config.architecture)
    config = read_model_config(model_family, checkpoint.config)
    model = model_family.load(ops, checkpoint, config, min(max_length, config.max_length))

    def forward(sequences: Sequence[Sequence[int]]) -> EagerLogits:
        logits = model.forward(ops, EagerBatch.of(sequences))
        assert isinstance(logits, EagerLogits)
        return logits

    return forward


def linear_layers(checkpoint: Checkpoint) -> dict[str, LinearUse]:
    """The linear layers of the model, by the name of their stored weight."""
    ops: Any = EagerOps()
    model_family = family(checkpoint.config.architecture)
    model_family.load(ops, checkpoint, read_model_config(model_family, checkpoint.config), 1)
    return {use.name: use for use in ops.linears}

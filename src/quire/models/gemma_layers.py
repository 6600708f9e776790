"""What Gemma 3n and Gemma 4 share: layers that read the keys and values of another layer, and norms of values."""

from collections.abc import Sequence
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.config import ATTENTION
from quire.weights.config import CheckpointConfig

SHARED = "shared"  # a kind of layer, beside ATTENTION: it has queries only


def kv_sources(hf: CheckpointConfig, windows: Sequence[int]) -> tuple[int, ...]:
    """For each layer, the layer whose keys and values it reads: itself or, in the last `num_kv_shared_layers`, the last
    layer before these with the same window."""
    layers = len(windows)
    first = layers - hf.int("num_kv_shared_layers", 0)
    if not 0 < first <= layers:
        raise BadCheckpoint(f"num_kv_shared_layers is {layers - first}, and there are {layers} layers")
    sources = list(range(layers))
    for layer in range(first, layers):
        same = [other for other in range(first) if bool(windows[other]) == bool(windows[layer])]
        if not same:
            raise BadCheckpoint(f"layer {layer} has no layer before {first} of its kind to share keys and values with")
        sources[layer] = same[-1]
    return tuple(sources)


def kinds(sources: Sequence[int]) -> tuple[str, ...]:
    return tuple(ATTENTION if source == layer else SHARED for layer, source in enumerate(sources))


def unused_keys(sources: Sequence[int]) -> list[str]:
    """Patterns of tensor names: checkpoints may have keys and values of layers that do not use them."""
    shared = "|".join(str(layer) for layer, source in enumerate(sources) if source != layer)
    return [rf"model\.layers\.({shared})\.self_attn\.[kv]_(proj|norm)\..*"] if shared else []


def scalar(tensor: Any) -> float:
    return float(tensor.ravel()[0])

"""Which layers have a sliding window, which rotate, and which have experts: a function for each way to configure it.

The rows of llama_families.py and moe_families.py name these functions."""

from collections.abc import Callable

from quire.core.errors import BadCheckpoint, Unsupported
from quire.weights.config import CheckpointConfig

Windows = Callable[[CheckpointConfig, int], tuple[int, ...]]  # (config, layers) -> window of each layer; 0: none
Rotation = Callable[[CheckpointConfig, tuple[int, ...]], tuple[bool, ...]]  # (config, windows) -> each layer has rope
SparseLayers = Callable[[CheckpointConfig, int], tuple[bool, ...]]  # (config, layers) -> each layer has experts


# -- sliding windows ---------------------------------------------------------------------------------------------------


def listed_windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """The window of every layer, by `layer_types`, which names the kind of each; 0: no window."""
    kinds = hf.list("layer_types")
    if len(kinds) != layers:
        raise BadCheckpoint(f"layer_types lists {len(kinds)} layers, and there are {layers}")
    known = {"full_attention": 0, "sliding_attention": hf.int("sliding_window", 0)}
    if unknown := sorted({str(kind) for kind in kinds} - known.keys()):
        raise Unsupported(f"layer_types lists {', '.join(unknown)}", f"supported: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def full_attention(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    return (0,) * layers


def window_everywhere(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    return (hf.int("sliding_window", 0),) * layers


def window_if_used(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """The same window in every layer, where `use_sliding_window` is set."""
    return (window_everywhere if hf.bool("use_sliding_window", False) else full_attention)(hf, layers)


def window_in_upper_layers(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """From layer `max_window_layers` on, where `use_sliding_window` is set."""
    first = hf.int("max_window_layers", 28) if hf.bool("use_sliding_window", False) else layers
    window = hf.int("sliding_window", 0)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def window_refused(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """The family has a window, but no checkpoint that uses it is published."""
    hf.expect("use_sliding_window", False, None)
    return full_attention(hf, layers)


def window_above(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """From layer `max_window_layers` on, whatever `use_sliding_window` says."""
    first, window = hf.int("max_window_layers", 62), hf.int("sliding_window", 0)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def window_except_every(period: int, first: bool = False) -> Windows:
    """In every layer but each `period`-th (the last of a period, or the first), which sees the whole context."""

    def windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
        window = hf.int("sliding_window", 0)
        return tuple(window if (layer + (not first)) % period else 0 for layer in range(layers))

    return windows


def window_by_pattern(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """In every layer but each `sliding_window_pattern`-th, or where that is a text such as "LLLG", in the layers whose
    letter is L; the last of all layers then has none."""
    if isinstance(letters := hf.get("sliding_window_pattern"), str):
        if not letters or set(letters) - set("LG"):
            raise BadCheckpoint(f"{hf.source}: sliding_window_pattern is {letters!r}, not made of L and G")
        window = hf.int("sliding_window", 0)
        local = [letters[layer % len(letters)] == "L" and layer < layers - 1 for layer in range(layers)]
        return tuple(window if is_local else 0 for is_local in local)
    period = hf.int("sliding_window_pattern", minimum=1)
    return window_except_every(period)(hf, layers)


# -- rotation ----------------------------------------------------------------------------------------------------------


def rope_everywhere(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    return (True,) * len(windows)


def rope_as_listed(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """`no_rope_layers` has a 0 for each layer without rope; by default that is every `no_rope_layer_interval`-th."""
    interval, layers = hf.int("no_rope_layer_interval", 4, minimum=1), len(windows)
    listed = hf.list("no_rope_layers", [(layer + 1) % interval for layer in range(layers)])
    if len(listed) != layers:
        raise BadCheckpoint(f"no_rope_layers lists {len(listed)} layers, and there are {layers}")
    return tuple(bool(rotated) for rotated in listed)


def rope_in_windows(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Layers without a window have no rope, if others have a window."""
    return tuple(map(bool, windows)) if any(windows) else (True,) * len(windows)


def rope_only_in_windows(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(map(bool, windows))


def rope_by_theta(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """A layer whose `layer_rope_theta` is 0 has no rope."""
    thetas = hf.list("layer_rope_theta", [1.0] * len(windows))
    if len(thetas) != len(windows):
        raise BadCheckpoint(f"layer_rope_theta lists {len(thetas)} layers, and there are {len(windows)}")
    return tuple(map(bool, thetas))


def rope_by_type(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether layers have rope, by `position_embedding_type`: all or none."""
    return (hf.expect("position_embedding_type", "rope", "nope", None) == "rope",) * len(windows)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts_by_step(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """In every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    dense, step = hf.list("mlp_only_layers", []), hf.int("decoder_sparse_step", 1, minimum=1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def experts_after_dense(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """From layer `first_k_dense_replace` on."""
    dense = hf.int("first_k_dense_replace", 0)
    return tuple(layer >= dense for layer in range(layers))


def experts_as_listed(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """In the layers that `mlp_layer_types` calls sparse; without that list, from `first_k_dense_replace` on."""
    kinds = hf.list("mlp_layer_types", [])
    if not kinds:
        return experts_after_dense(hf, layers)
    if len(kinds) != layers or (unknown := {str(kind) for kind in kinds} - {"dense", "sparse"}):
        problem = f"lists {len(kinds)} layers" if len(kinds) != layers else f"lists {', '.join(sorted(unknown))}"
        raise BadCheckpoint(f"mlp_layer_types {problem}, and there are {layers} layers, dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)


def experts_in_range(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """In every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`, both included."""
    first, last = hf.int("moe_layer_start_index", 1), hf.int("moe_layer_end_index", -1)
    inside = range(first, layers if last == -1 else last + 1)
    interval = max(hf.int("moe_layer_interval", 1), 1)
    return tuple(layer in inside and (layer + 1) % interval == 0 for layer in range(layers))

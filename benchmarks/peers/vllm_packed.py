"""Random packed weights for vLLM: a file of its own, so that vLLM's processes find the function by its name."""

from typing import Any


def fill_packed(model: Any) -> int:
    """Random bits for all packed weights, which `load_format="dummy"` leaves as the memory was -> how many weights."""
    packed = [weight for name, weight in model.named_parameters() if name.endswith("qweight")]
    for weight in packed:
        weight.data.random_(-(2**31), 2**31 - 1)
    return len(packed)

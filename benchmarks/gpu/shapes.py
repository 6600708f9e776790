"""The matrices of Llama-3.1-8B, as (outputs, inputs)."""

from quire.ops.gpu.linear.linear import num_splits

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}


def splits_to_try(N: int, K: int) -> list[int]:
    """Those chosen, half and twice as many."""
    chosen = num_splits(N, K)
    return sorted({max(chosen // 2, 1), chosen, 2 * chosen})

"""Causal attention with a whole matrix of scores a head, in plain torch: what flash attention is compared with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.ops.opset import Float32
from quire.ops.reference.attention import attention


def naive_attention(
    rows: Float32, columns: Sequence[int], head_dim: int, scale: float, dtype: str, device: str = "cuda"
) -> Callable[[], Tensor]:
    """rows [length, q, k and v] -> what computes [length, heads * head_dim]."""
    held = torch.from_numpy(rows).to(device, getattr(torch, dtype))
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in held.split(list(columns), dim=1))
    return lambda: attention(q, k, v, scale, 0).flatten(1)


def peak_bytes(run: Callable[[], object]) -> int:
    """Memory of the GPU that `run` takes at its peak, beyond what is taken before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)

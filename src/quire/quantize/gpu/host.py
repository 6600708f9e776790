"""Arrays between host and device, by way of page-locked memory: the driver copies other memory at 2 GB/s, for one
thread at a time."""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STAGING_BYTES = 32 << 20
_local = threading.local()


def to_device(values: NDArray[Any], device: str) -> Tensor:
    flat, staging = np.ascontiguousarray(values).reshape(-1).view(np.uint8), _staging()
    copied = torch.empty(flat.size, dtype=torch.uint8, device=device)
    for span in _spans(flat.size):
        part = staging[: span.stop - span.start]
        np.copyto(part.numpy(), flat[span])
        copied[span].copy_(part)
    return copied.view(torch.from_numpy(np.empty(0, values.dtype)).dtype).view(values.shape)


def to_host(values: Tensor) -> NDArray[Any]:
    copied = np.empty(values.shape, torch.empty(0, dtype=values.dtype).numpy().dtype)
    flat, staging = values.contiguous().view(-1).view(torch.uint8), _staging()
    target = copied.reshape(-1).view(np.uint8)
    for span in _spans(target.size):
        part = staging[: span.stop - span.start]
        part.copy_(flat[span])
        np.copyto(target[span], part.numpy())
    return copied


def _staging() -> Tensor:
    """A buffer of this thread."""
    if not hasattr(_local, "staging"):
        _local.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    staging: Tensor = _local.staging
    return staging


def _spans(count: int) -> list[slice]:
    return [slice(first, min(first + STAGING_BYTES, count)) for first in range(0, count, STAGING_BYTES)]

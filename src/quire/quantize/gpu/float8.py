"""`float8.py` in torch, to the bit."""

from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.quantize.float8 import BLOCK, LARGEST
from quire.quantize.gpu.host import to_host


def encode(w: Tensor, by: str) -> dict[str, NDArray[Any]]:
    """`by`: what shares a scale, "tensor", "channel" or "block"."""
    if by == "block":
        rows, columns = (-(-size // BLOCK) for size in w.shape)
        padded = F.pad(w, (0, columns * BLOCK - w.shape[1], 0, rows * BLOCK - w.shape[0]))
        scales = _scales(padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)))
        each = scales.repeat_interleave(BLOCK, 0)[: len(w)].repeat_interleave(BLOCK, 1)[:, : w.shape[1]]
    else:
        largest = w.abs().amax(1, keepdim=True)
        each = scales = _scales(largest.max().view(1) if by == "tensor" else largest)
    limit = float(LARGEST)
    q = (w / each).clamp_(-limit, limit).to(torch.float8_e4m3fn)
    return {"weight": to_host(q.view(torch.uint8)), "weight_scale": to_host(scales)}


def _scales(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / torch.full_like(largest, float(LARGEST)), 1.0)

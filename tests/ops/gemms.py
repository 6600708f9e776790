"""What tests of GEMMs in Triton share: random matrices, and how near a result must be to the fp32 matmul."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's tl.dot does not know bf16


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, tolerance: float = 0.0) -> None:
    """y against the fp32 matmul, as a share of each output's sum of magnitudes: `tolerance` and y's own rounding."""
    truth = x.double() @ w.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ w.double().abs().T
    unit = torch.finfo(y.dtype).eps
    assert y.isfinite().all()
    assert ((y.double() - truth).abs() <= (tolerance + 1e-5) * size + unit * truth.abs() + 1e-6).all()


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def spread(values: Tensor, num_inputs: int) -> Tensor:
    """[N, groups] -> [N, K]"""
    return values.float().repeat_interleave(num_inputs // values.shape[1], dim=1)

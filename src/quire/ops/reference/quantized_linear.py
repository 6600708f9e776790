"""Linear layers whose activations are quantized to 8 bits, a scale a token: the specification of W8A8 and W4A8.

    x is about x_scale * x_q,  x_scale = max|x| / 127 (int8) or / 448 (fp8) of a token
    W8A8   y = x_scale * w_scale * sum(x_q * w_q)                    int8, one scale an output
    W4A8   y = x_scale * sum over groups of w_scale * sum(x_q * w_q)  fp8 times integers -8 .. 7, one scale a group

Sums of integers are exact; those of fp8 are fp32 here, and a kernel may add up 128 inputs with fewer bits."""

import torch
from torch import Tensor

MAX_INT8, MAX_FP8 = 127.0, 448.0


def quantize_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, K] -> x_q [M, K] int8 or float8_e4m3fn, x_scale [M, 1] fp32"""
    most = MAX_INT8 if dtype == torch.int8 else MAX_FP8
    scales = x.float().abs().amax(1, keepdim=True) / most
    q = x.float() / torch.where(scales > 0, scales, 1.0)
    return (q.round() if dtype == torch.int8 else q).to(dtype), scales


def w8a8_linear(x_q: Tensor, x_scales: Tensor, w_q: Tensor, w_scales: Tensor) -> Tensor:
    """x_q [M, K] and w_q [N, K] int8, x_scales [M, 1], w_scales [N] -> [M, N] fp32"""
    sums = x_q.double() @ w_q.double().T  # exact
    return sums.float() * (w_scales.float() * x_scales)


def w4a8_linear(x_q: Tensor, x_scales: Tensor, w_q: Tensor, w_scales: Tensor) -> Tensor:
    """x_q [M, K] float8_e4m3fn, w_q [N, K] integers of -8 .. 7, x_scales [M, 1], w_scales [N, groups] -> [M, N] fp32"""
    groups = w_scales.shape[1]
    x_groups, w_groups = (t.float().unflatten(1, (groups, -1)).transpose(0, 1) for t in (x_q, w_q))
    sums = torch.bmm(x_groups, w_groups.transpose(1, 2))  # [groups, M, N]
    return (sums * w_scales.float().T[:, None, :]).sum(0) * x_scales

"""Activations in plain torch."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.opset import Activation

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.TANH: torch.tanh,
    Activation.ELU: F.elu,
    # In fp64: torch's vectors and the rest of an array would round otherwise, and states remember it.
    Activation.SIGMOID: lambda x: torch.sigmoid(x.double()).to(x.dtype),
    Activation.SOFTPLUS: F.softplus,
    Activation.CLAMPED_SWIGLU: lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
}


def activate_and_clamp(x: Tensor, kind: Activation, limit: float, gate_limit: float = 0.0) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate_limit = gate_limit or limit
    return ACTIVATIONS[kind](gate).clamp(-gate_limit, gate_limit) * up.clamp(-limit, limit)

"""The mixer of Mamba (1), which every layer of Mamba has, and most layers of Jamba.

A linear layer gives x and a gate. A causal convolution runs over x, and linear layers of what it gives are dt, b and c
of the recurrence (`OpSet.mamba_scan`). Falcon-Mamba and Jamba norm dt, b and c."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.causal_conv import StoredConv
from quire.models.constant_weights import Ones
from quire.models.loading import Linear, TensorSpec, TensorSpecs, Vector
from quire.models.mamba2_mixer import MAX_NUMBERS
from quire.ops.dequantize import dequantize
from quire.ops.kv_spec import MAX_CONV_TAPS, StateSpec
from quire.ops.opset import Activation, MambaWeights, OpSet, Value
from quire.ops.tensors import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    channels: int
    columns: int  # of the state: numbers of b and of c
    rank: int  # of dt, before its linear layer
    taps: int  # of the convolution
    conv_bias: bool = True
    bias: bool = False  # of the first and of the last linear layer
    norms: Literal["none", "stored", "plain"] = "none"  # of dt, b and c; plain ones have no weights
    norm_eps: float = 1e-6
    converted: bool = False  # the checkpoint is a GGUF file

    def __post_init__(self) -> None:
        for name in ("channels", "columns", "rank"):
            if getattr(self, name) < 1:
                raise BadCheckpoint(
                    f"the configuration of the checkpoint gives {name} of Mamba as {getattr(self, name)}"
                )
        if self.channels * self.columns > MAX_NUMBERS:
            raise BadCheckpoint(f"{self.columns} x {self.channels} numbers are more than {MAX_NUMBERS}")
        if not 1 <= self.taps <= MAX_CONV_TAPS:
            raise Unsupported(
                f"convolutions over {self.taps} tokens", f"those over 1 to {MAX_CONV_TAPS} tokens are supported"
            )

    def states(self, num_layers: int) -> StateSpec:
        return StateSpec(num_layers, (self.columns, self.channels), self.channels, self.taps)


@dataclass(frozen=True, slots=True)
class StoredMambaScan:
    """The weights of the recurrence: `name.A_log` [channels, columns] and `name.D` [channels]. GGUF files have
    `name.A`, which is -exp(A_log)."""

    name: str
    channels: int
    columns: int
    converted: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.{'A' if self.converted else 'A_log'}", (self.channels, self.columns)
        yield f"{self.name}.D", (self.channels,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> MambaWeights:
        stored, skip = tensors
        a = dequantize(stored).reshape(self.channels, self.columns)
        rates = a if self.converted else -np.exp(a)
        return MambaWeights(ops.biases(np.ascontiguousarray(rates.T)), ops.vector(skip))


def mixer_specs(m: MambaShape, hidden: int, name: str) -> TensorSpecs:
    """`name`: of the mixer in a layer."""
    specs: dict[str, TensorSpec] = {
        "mamba_in": Linear({f"{name}.in_proj": 2 * m.channels}, hidden, bias=m.bias),
        "conv": StoredConv(f"{name}.conv1d", m.channels, m.taps, m.converted),
        "parameters": Linear({f"{name}.x_proj": m.rank + 2 * m.columns}, m.channels),
        "dt": Linear({f"{name}.dt_proj": m.channels}, m.rank, bias=True),
        "scan": StoredMambaScan(name, m.channels, m.columns, m.converted),
        "mamba_out": Linear({f"{name}.out_proj": hidden}, m.channels, bias=m.bias),
    }
    if m.conv_bias:
        specs["conv_bias"] = Vector(f"{name}.conv1d", m.channels, "bias")
    for part, size in (("dt", m.rank), ("b", m.columns), ("c", m.columns)):
        if m.norms != "none":
            specs[f"{part}_norm"] = Vector(f"{name}.{part}_layernorm", size) if m.norms == "stored" else Ones(size)
    return specs


def mixer(m: MambaShape, layer: Any, ops: OpSet, x: Value, batch: Any, number: int) -> Value:
    """`number`: of the layer among those with states."""
    x, gate = ops.split(ops.linear(x, layer.mamba_in), (m.channels, m.channels))
    y = scanned(m, layer, ops, x, batch, number)
    return ops.linear(ops.mul(y, ops.activate(gate, Activation.SILU)), layer.mamba_out)


def scanned(m: MambaShape, layer: Any, ops: OpSet, x: Value, batch: Any, number: int) -> Value:
    """The convolution and the recurrence: x [T, channels] -> [T, channels]."""
    x = ops.activate(ops.causal_conv(x, layer.conv, layer.conv_bias, batch, number), Activation.SILU)
    dt, b, c = ops.split(ops.linear(x, layer.parameters), (m.rank, m.columns, m.columns))
    if m.norms != "none":
        parts = ((dt, layer.dt_norm), (b, layer.b_norm), (c, layer.c_norm))
        dt, b, c = (ops.rms_norm(part, weight, m.norm_eps) for part, weight in parts)
    return ops.mamba_scan(x, ops.linear(dt, layer.dt), b, c, layer.scan, batch, number)

"""The mixer of Mamba 2, which hybrids have in some of their layers instead of attention, or beside it.

A linear layer gives a gate, dt, and x, b and c, over which a causal convolution runs. The recurrence mixes tokens
(`OpSet.mamba2_scan`), and what it gives is normed and gated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.causal_conv import StoredConv
from quire.models.loading import Linear, TensorSpec, TensorSpecs, Vector
from quire.ops.dequantize import dequantize
from quire.ops.kv_spec import MAX_CONV_TAPS, StateSpec
from quire.ops.opset import Activation, Mamba2Weights, OpSet, Value
from quire.ops.tensors import StoredTensor, stored_floats
from quire.weights.config import CheckpointConfig

MAMBA = "mamba"  # a kind of layer, beside ATTENTION
MAX_NUMBERS = 1 << 26  # of one layer's state; memory is allocated for it before tensors are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    heads: int
    head_dim: int
    groups: int  # heads of one share their b and c
    columns: int  # of the state: numbers of b and of c
    taps: int  # of the convolution
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm: bool = True  # of the output, over each group
    gate_first: bool = True  # before the norm
    in_scale: float = 1.0  # of the input
    scales: tuple[float, ...] = (1.0,) * 5  # of gate, x, b, c and dt
    converted: bool = False  # the checkpoint is a GGUF file

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "groups", "columns"):
            if getattr(self, name) < 1:
                raise BadCheckpoint(
                    f"the configuration of the checkpoint gives {name} of Mamba as {getattr(self, name)}"
                )
        if self.heads % self.groups:
            raise BadCheckpoint(f"{self.heads} heads of Mamba cannot share {self.groups} groups evenly")
        if self.heads * self.head_dim * self.columns > MAX_NUMBERS:
            raise BadCheckpoint(
                f"{self.heads} heads of {self.columns} x {self.head_dim} numbers are more than {MAX_NUMBERS}"
            )
        if not 1 <= self.taps <= MAX_CONV_TAPS:
            raise Unsupported(
                f"convolutions over {self.taps} tokens", f"those over 1 to {MAX_CONV_TAPS} tokens are supported"
            )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.columns

    def states(self, num_layers: int) -> StateSpec:
        return StateSpec(num_layers, (self.heads, self.columns, self.head_dim), self.conv_channels, self.taps)


def hybrid_shape(hf: CheckpointConfig, **others: Any) -> Mamba2Shape:
    """From the keys that Bamba, Granite 4 and Falcon-H1 have in common."""
    hidden, heads = hf.int("hidden_size"), hf.int("mamba_n_heads", 128)
    inner = hf.int("mamba_d_ssm", 0) or hf.int("mamba_expand", 2) * hidden
    head_dim = inner // max(heads, 1) if hf.get("mamba_d_head", "auto") == "auto" else hf.int("mamba_d_head")
    if head_dim * heads != inner:
        raise BadCheckpoint(f"{heads} heads of Mamba of {head_dim} columns are not {inner} columns")
    return Mamba2Shape(
        heads=heads,
        head_dim=head_dim,
        groups=hf.int("mamba_n_groups", 1),
        columns=hf.int("mamba_d_state", 256),
        taps=hf.int("mamba_d_conv", 4),
        conv_bias=hf.bool("mamba_conv_bias", True),
        in_bias=hf.bool("mamba_proj_bias", False),
        dt_limit=dt_limit(hf),
        converted=hf.bool("converted", False),
        **{"out_bias": hf.bool("mamba_proj_bias", False), **others},
    )


def dt_limit(hf: CheckpointConfig) -> tuple[float, float]:
    """`time_step_limit`, whose end may be infinite."""
    ends = hf.list("time_step_limit", [0.0, float("inf")])
    numbers = [float(end["__float__"] if isinstance(end, dict) else end) for end in ends]
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise BadCheckpoint(f"time_step_limit is {ends}, and not two numbers, the lower one first")
    return numbers[0], numbers[1]


@dataclass(frozen=True, slots=True)
class StoredMamba2Scan:
    """The weights of the recurrence: `name.A_log`, `name.dt_bias` and `name.D`, one number a head. GGUF files have
    `name.A`, which is -exp(A_log), and `name.D` as columns."""

    name: str
    heads: int
    groups: int
    dt_limit: tuple[float, float]
    converted: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        column = (self.heads, 1) if self.converted else (self.heads,)
        yield f"{self.name}.{'A' if self.converted else 'A_log'}", column
        yield f"{self.name}.{'dt.bias' if self.converted else 'dt_bias'}", (self.heads,)
        yield f"{self.name}.D", column

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Mamba2Weights:
        a, dt_bias, skip = (dequantize(tensor).ravel() for tensor in tensors)
        vectors = (a if self.converted else -np.exp(a), dt_bias, skip)
        a, dt_bias, skip = (ops.vector(stored_floats(self.name, vector)) for vector in vectors)
        return Mamba2Weights(a, dt_bias, skip, self.groups, self.dt_limit)


@dataclass(frozen=True, slots=True)
class GroupedNorm:
    """The weight of a norm in groups, stored by GGUF files as `name.weight` [groups, size of a group]."""

    name: str
    groups: int
    size: int  # of all groups

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.groups, self.size // self.groups)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        return ops.vector(stored_floats(tensor.name, dequantize(tensor).ravel()))


def mixer_specs(m: Mamba2Shape, hidden: int, name: str) -> TensorSpecs:
    """`name`: of the mixer in a layer."""
    of_state = m.groups * m.columns
    scales = ((m.inner, m.scales[1]), (of_state, m.scales[2]), (of_state, m.scales[3]))
    specs: dict[str, TensorSpec] = {
        "mamba_in": Linear({f"{name}.in_proj": m.inner + m.conv_channels + m.heads}, hidden, bias=m.in_bias),
        "conv": StoredConv(f"{name}.conv1d", m.conv_channels, m.taps, m.converted, scales),
        "scan": StoredMamba2Scan(name, m.heads, m.groups, m.dt_limit, m.converted),
        "mamba_out": Linear({f"{name}.out_proj": hidden}, m.inner, bias=m.out_bias),
    }
    if m.conv_bias:
        specs["conv_bias"] = Vector(f"{name}.conv1d", m.conv_channels, "bias")
    if m.norm:
        norm = f"{name}.norm"
        specs["gated_norm"] = GroupedNorm(norm, m.groups, m.inner) if m.converted else Vector(norm, m.inner)
    return specs


def mixer(m: Mamba2Shape, layer: Any, eps: float, ops: OpSet, x: Value, batch: Any, number: int) -> Value:
    """`number`: of the layer among those with states."""
    sizes = (m.inner, m.conv_channels, m.heads)
    gate, mixed, dt = ops.split(ops.linear(_scaled(ops, x, m.in_scale), layer.mamba_in), sizes)
    mixed = ops.activate(ops.causal_conv(mixed, layer.conv, layer.conv_bias, batch, number), Activation.SILU)
    x, b, c = ops.split(mixed, (m.inner, m.groups * m.columns, m.groups * m.columns))
    y = ops.mamba2_scan(x, _scaled(ops, dt, m.scales[4]), b, c, layer.scan, batch, number)
    gate = ops.activate(_scaled(ops, gate, m.scales[0]), Activation.SILU)
    y = ops.mul(y, gate) if m.gate_first else y
    y = ops.rms_norm(y, layer.gated_norm, eps, m.groups) if m.norm else y
    return ops.linear(y if m.gate_first else ops.mul(y, gate), layer.mamba_out)


def _scaled(ops: OpSet, x: Value, factor: float) -> Value:
    return x if factor == 1 else ops.scale(x, factor)

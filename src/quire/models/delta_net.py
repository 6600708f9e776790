"""Gated delta nets: the layers with linear attention of hybrids (Qwen3-Next, Qwen3.5, OLMo Hybrid).

A layer projects its input to q, k and v, mixes each of their columns over the last few tokens by a causal convolution,
and lets the gated delta rule read and change the state of each head. The output of a head is normed, and multiplied by
an activated gate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.config import ATTENTION
from quire.models.constant_weights import ConstantVector
from quire.models.loading import Linear, TensorSpec, TensorSpecs, Vector
from quire.models.moe import MoeLayer
from quire.ops.dequantize import dequantize
from quire.ops.kv_spec import MAX_CONV_TAPS, StateSpec
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import StoredTensor, stored_floats
from quire.weights.config import CheckpointConfig

LINEAR = "linear_attention"  # a kind of layer, beside ATTENTION
L2_EPS = 1e-6  # of the norms of q and k: no configuration has it


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of linear attention. Groups of neighbouring heads share q and k, unless they are `tiled`."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    max_beta: float = 1.0  # beta is a sigmoid times this
    gate: Activation = Activation.SILU  # of the output
    tiled: bool = False  # heads take the key heads in turn: in GGUF files

    def __post_init__(self) -> None:
        if min(self.key_heads, self.heads, self.key_dim, self.value_dim) < 1 or self.heads % self.key_heads:
            raise BadCheckpoint(
                f"linear attention has {self.heads} heads of {self.value_dim} columns, and {self.key_heads} key heads "
                f"of {self.key_dim}"
            )
        if not 1 <= self.taps <= MAX_CONV_TAPS:
            raise Unsupported(
                f"linear_conv_kernel_dim is {self.taps}", f"convolutions over 1 to {MAX_CONV_TAPS} tokens are supported"
            )

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns of q, k and v together."""
        return 2 * self.key_size + self.value_size

    def states(self, num_layers: int) -> StateSpec | None:
        shape = (self.heads, self.key_dim, self.value_dim)
        return StateSpec(num_layers, shape, self.channels, self.taps) if num_layers else None


def read_shape(hf: CheckpointConfig, **options: Any) -> DeltaShape:
    hf.expect("hidden_act", "silu")  # of the convolution, too
    return DeltaShape(
        key_heads=hf.int("linear_num_key_heads"),
        heads=hf.int("linear_num_value_heads"),
        key_dim=hf.int("linear_key_head_dim"),
        value_dim=hf.int("linear_value_head_dim"),
        taps=hf.int("linear_conv_kernel_dim", 4),
        **options,
    )


def layer_kinds(hf: CheckpointConfig, layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """The kind of every layer, by `layer_types`."""
    kinds = hf.list("layer_types", list(default))
    if len(kinds) != layers:
        raise BadCheckpoint(f"layer_types lists {len(kinds)} layers, and there are {layers}")
    if unknown := sorted({str(kind) for kind in kinds} - {ATTENTION, LINEAR}):
        raise Unsupported(f"layer_types lists {', '.join(unknown)}", f"supported: {ATTENTION}, {LINEAR}")
    if ATTENTION not in kinds:
        raise Unsupported("no layer has attention", f"at least one of layer_types must be {ATTENTION}")
    return tuple(kinds)


def interval_kinds(hf: CheckpointConfig, layers: int) -> tuple[str, ...]:
    """The kind of every layer, by `layer_types`; without it, every `full_attention_interval`-th layer has attention."""
    interval = hf.int("full_attention_interval", 4, minimum=1)
    default = [LINEAR if (layer + 1) % interval else ATTENTION for layer in range(layers)]
    return layer_kinds(hf, layers, default)


def hybrid_fields(fields: dict[str, Any], kinds: tuple[str, ...], shape: DeltaShape) -> dict[str, Any]:
    """The fields of a configuration, with those of linear attention added."""
    return fields | {"kinds": kinds, "states": shape.states(kinds.count(LINEAR)), "delta": shape}


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConvWeight:
    """The weights of causal convolutions side by side: `name.weight` [channels, 1, taps], or [channels, taps] in GGUF
    files."""

    parts: Mapping[str, int]  # name -> channels
    taps: int
    flat: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        middle = () if self.flat else (1,)
        for name, channels in self.parts.items():
            yield f"{name}.weight", (channels, *middle, self.taps)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        weights = [dequantize(tensor).reshape(-1, self.taps) for tensor in tensors]
        return ops.conv_weight(stored_floats(tensors[0].name, np.concatenate(weights)))


@dataclass(frozen=True, slots=True)
class DecayRate:
    """The rate of each head, `repeats` times: stored as its logarithm, or in GGUF files as its negative, or `plain`."""

    name: str
    shape: tuple[int, ...]
    repeats: int = 1
    negated: bool = False
    plain: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        stored = dequantize(tensor).ravel()
        rates = -stored if self.negated else stored if self.plain else np.exp(stored)
        return ops.vector(stored_floats(tensor.name, np.repeat(rates, self.repeats)))


def state_specs(s: DeltaShape, conv: ConvWeight, rates: TensorSpec, biases: Vector, norm: str) -> TensorSpecs:
    """What all families have beside their linear layers.

    q and k are normed to length 1, and q is divided by the root of its size: an RMS norm by a constant weight."""
    return {
        "conv": conv,
        "q_norm": ConstantVector(s.key_dim, 1 / s.key_dim),
        "k_norm": ConstantVector(s.key_dim, s.key_dim**-0.5),
        "decay_rate": rates,
        "decay_bias": biases,
        "delta_norm": Vector(norm, s.value_dim),
    }


def gates(parts: Mapping[str, Any], hidden: int) -> Linear:
    """The matrices of beta and decay: small matrices, whose errors every later token would see."""
    return Linear(parts, hidden, keep=Keep.ALL)


@dataclass(frozen=True, slots=True)
class DeltaLayer(MoeLayer):
    """With attention, or with linear attention, in which `qkv` is None; with experts, or without."""

    qkv: Any = None
    out: Any = None
    delta_in: Any = None  # hidden -> q, k, v, the gate of the output
    delta_gates: Any = None  # hidden -> the inputs of beta and of the decay, a column a head
    conv: Any = None
    decay_rate: Any = None
    decay_bias: Any = None
    delta_norm: Any = None


# -- forward -----------------------------------------------------------------------------------------------------------


def delta_net(c: Any, layer: Any, number: int, ops: OpSet, x: Value, batch: Any) -> Value:
    """`number`: of the layer, among those with linear attention."""
    s: DeltaShape = c.delta
    qkv, gate = ops.split(ops.linear(x, layer.delta_in), (s.channels, s.value_size))
    beta, decay = ops.split(ops.linear(x, layer.delta_gates), (s.heads, s.heads))
    decay = ops.decay(decay, layer.decay_bias, layer.decay_rate)
    attended = attend(s, layer, number, ops, qkv, decay, beta, batch)
    return ops.linear(gated_norm(s, ops, attended, gate, layer.delta_norm, c.delta_eps), layer.out)


def attend(
    s: DeltaShape, layer: Any, number: int, ops: OpSet, qkv: Value, decay: Value, beta: Value, batch: Any
) -> Value:
    """qkv [T, channels], the decay, and what beta is the sigmoid of -> [T, value_size]"""
    mixed = ops.activate(ops.causal_conv(qkv, layer.conv, None, batch, number), Activation.SILU)
    q, k, v = ops.split(mixed, (s.key_size, s.key_size, s.value_size))
    eps = L2_EPS / s.key_dim  # of a mean of squares, where the norm is of their sum
    q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
    beta = ops.activate(beta, Activation.SIGMOID)
    beta = beta if s.max_beta == 1 else ops.scale(beta, s.max_beta)
    return ops.delta_rule(q, k, v, decay, beta, batch, number, s.key_dim, s.tiled)


def gated_norm(s: DeltaShape, ops: OpSet, x: Value, gate: Value, weight: Any, eps: float) -> Value:
    return ops.mul(ops.rms_norm(x, weight, eps), ops.activate(gate, s.gate))

"""RWKV 7: layers of time mixing, whose state is a matrix of each head (`OpSet.wkv7`), and of channel mixing.

Both read a blend of their input with that of the token before: a convolution over two tokens. Time mixing blends
differently for each of its six inputs. Values of all layers but the first are blended with those of the first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models.config import ModelConfig
from quire.models.llama import normed
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpec, TensorSpecs, load_weights
from quire.models.mamba2 import without_attention
from quire.ops.dequantize import dequantize
from quire.ops.kv_spec import StateSpec
from quire.ops.opset import Activation, Keep, OpSet, Value, Wkv7Weights
from quire.ops.tensors import StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

TIME_MIX = "time_mix"  # a kind of layer
INPUTS = "rwkvag"  # of time mixing, in the order in which GGUF files stack their factors
RANKS = {"w": ("decay", 0.5, 1.8), "a": ("a", 0.5, 1.8), "v": ("v", 0.5, 1.3), "g": ("gate", 0.8, 0.6)}
MAX_HEAD = 256  # columns of a head
# The low-rank matrices of values in layer 0, which some writers store.
UNUSED = r"model\.layers\.0\.attn\.v_lora\..*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rwkv7Config(ModelConfig):
    eps: float
    tied: bool
    state_heads: int
    intermediate: int
    ranks: dict[str, int]  # of the low-rank matrices, by input


def config(hf: CheckpointConfig) -> Rwkv7Config:
    hidden, layers, size = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("head_dim", 64)
    hf.expect("hidden_act", "sqrelu", None)
    hf.expect("norm_first", True, None)
    hf.expect("attn", None)
    if not 1 <= size <= MAX_HEAD or hidden % size:
        raise BadCheckpoint(f"{hf.source}: head_dim is {size}, and hidden_size {hidden}; up to {MAX_HEAD} is supported")
    heads = hidden // size
    fields = without_attention(hf, hidden, layers) | {"kinds": (TIME_MIX,) * layers, "eps": hf.float("norm_eps", 1e-5)}
    return Rwkv7Config(
        **fields,
        states=StateSpec(layers, (heads, size, size), conv_channels=(len(INPUTS) + 1) * hidden, conv_taps=2),
        state_heads=heads,
        intermediate=hf.int("intermediate_size", int(hidden * hf.float("hidden_ratio", 4.0))),
        ranks={part: _rank(hf, hidden, *given) for part, given in RANKS.items()},
    )


def _rank(hf: CheckpointConfig, hidden: int, name: str, exponent: float, factor: float) -> int:
    return hf.int(f"{name}_low_rank_dim", max(1, round(hidden**exponent * factor / 32)) * 32)


# -- tensors -----------------------------------------------------------------------------------------------------------

Shape = Callable[[str], tuple[int, ...]]  # of a stored tensor of the first layer


@dataclass(frozen=True, slots=True)
class TokenShift:
    """Factors of the token before, as the weights of a convolution: x + factor * (before - x)."""

    parts: dict[str, tuple[int, ...]]  # name -> shape in the checkpoint

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.parts.items()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        factors = np.concatenate([dequantize(tensor).ravel() for tensor in tensors])
        return ops.conv_weight(stored_floats(tensors[0].name, np.stack([factors, 1 - factors], axis=1)))


@dataclass(frozen=True, slots=True)
class StoredWkv7:
    """The vectors of the recurrence: `attn.k_k`, `attn.k_a`, `attn.r_k` and the norm of its output."""

    heads: int
    hidden: int
    eps: float
    shape: Shape

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in ("k_k", "k_a", "r_k"):
            yield f"attn.{name}", self.shape(f"attn.{name}")
        for kind in ("weight", "bias"):
            yield f"attn.g_norm.{kind}", (self.hidden,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Wkv7Weights:
        k_k, k_a, r_k, norm, bias = (
            ops.vector(stored_floats(tensor.name, dequantize(tensor).ravel())) for tensor in tensors
        )
        return Wkv7Weights(k_k, k_a, r_k, norm, bias, self.heads, self.eps * self.hidden / self.heads)


def stored_shape(checkpoint: Checkpoint, c: Rwkv7Config) -> Shape:
    """Vectors are stored with axes of 1, or divided into heads, or as they are."""
    names, heads = set(checkpoint.names()), (c.state_heads, c.hidden // c.state_heads)

    def shape(name: str) -> tuple[int, ...]:
        whole = f"model.layers.0.{name}"
        expected = len(INPUTS) * c.hidden if name == "attn.x_x" else c.hidden
        if whole not in names:
            return heads if name == "attn.r_k" else (c.hidden,)
        stored = checkpoint.shape(whole)
        if prod(stored) != expected:
            raise BadCheckpoint(f"{whole} is {[*stored]}, and not of {expected} numbers")
        return stored

    return shape


def layer_specs(c: Rwkv7Config, index: int, shape: Shape, fused: bool) -> TensorSpecs:
    shifts = ["attn.x_x"] if fused else [f"attn.x_{part}" for part in INPUTS]
    specs: dict[str, TensorSpec] = {
        "attn_norm": LayerNorm("attn_norm", c.hidden),
        "shifts": TokenShift({name: shape(name) for name in shifts}),
        "wkv": StoredWkv7(c.state_heads, c.hidden, c.eps, shape),
        **{part: Linear({f"attn.{part}_proj": c.hidden}, c.hidden) for part in "rkv"},
        "out": Linear({"attn.o_proj": c.hidden}, c.hidden),
        "mlp_norm": LayerNorm("ffn_norm", c.hidden),
        "mlp_shift": TokenShift({"ffn.x_k": shape("ffn.x_k")}),
        "up": Linear({"ffn.key": c.intermediate}, c.hidden),
        "down": Linear({"ffn.value": c.hidden}, c.intermediate),
    }
    for part, rank in c.ranks.items():
        if part != "v" or index:
            stem, bias = f"attn.{part}_lora.lora", part != "g"
            specs[f"{part}_down"] = Linear({f"{stem}.0": rank}, c.hidden, keep=Keep.ALL)
            specs[f"{part}_up"] = Linear({f"{stem}.2": c.hidden}, rank, bias=bias, keep=Keep.ALL)
    return specs


@dataclass(frozen=True, slots=True)
class Rwkv7Layer:
    attn_norm: Any
    shifts: Any
    wkv: Wkv7Weights
    r: Any
    k: Any
    v: Any
    out: Any
    w_down: Any
    w_up: Any
    a_down: Any
    a_up: Any
    g_down: Any
    g_up: Any
    mlp_norm: Any
    mlp_shift: Any
    up: Any
    down: Any
    v_down: Any = None  # of all layers but the first
    v_up: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: Rwkv7Config, max_model_len: int) -> LoadedModel:
    c, shape = config, stored_shape(checkpoint, config)
    top_specs: TensorSpecs = {
        "embed": EmbeddingTable("model.embeddings", c.vocab, c.hidden),
        "embed_norm": LayerNorm("model.layers.0.pre_norm", c.hidden),
        "norm": LayerNorm("model.norm", c.hidden),
        "head": Linear({"model.embeddings" if c.tied else "lm_head": c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }
    fused = "model.layers.0.attn.x_x" in checkpoint.names()
    layers = {f"model.layers.{index}.": layer_specs(c, index, shape, fused) for index in range(c.layers)}
    unused = "|".join([UNUSED, *(["lm_head.weight"] if c.tied else [])])
    top, loaded = load_weights(ops, checkpoint, top_specs, layers, unused)
    forward_pass = partial(forward, c, top, [Rwkv7Layer(**layer) for layer in loaded])
    return LoadedModel(c, forward_pass, [top, *loaded])


# -- forward -----------------------------------------------------------------------------------------------------------


def forward(c: Rwkv7Config, top: Any, layers: list[Rwkv7Layer], ops: OpSet, batch: Any) -> Value:
    x = normed(ops, ops.embedding(batch.ids, top["embed"]), top["embed_norm"], c.eps)
    first_value = None
    for index, layer in enumerate(layers):
        ops.tap(x, index)
        h = normed(ops, x, layer.attn_norm, c.eps)
        mixed, first_value = time_mix(c, layer, ops, h, first_value, batch, index)
        x = ops.add(x, mixed)
        x = ops.add(x, channel_mix(c, layer, ops, normed(ops, x, layer.mlp_norm, c.eps), batch, index))
    ops.tap(x, c.layers)
    x = normed(ops, x, top["norm"], c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, top["head"], batch)


def time_mix(
    c: Rwkv7Config, layer: Rwkv7Layer, ops: OpSet, x: Value, first_value: Value | None, batch: Any, index: int
) -> tuple[Value, Value]:
    """-> what is added to the hidden states, and the values of the first layer"""
    shifted = ops.causal_conv(ops.concat([x] * len(INPUTS)), layer.shifts, None, batch, index)
    xr, xw, xk, xv, xa, xg = ops.split(shifted, (c.hidden,) * len(INPUTS))
    decay = ops.linear(ops.activate(ops.linear(xw, layer.w_down), Activation.TANH), layer.w_up)
    rate = ops.activate(ops.linear(ops.linear(xa, layer.a_down), layer.a_up), Activation.SIGMOID)
    gate = ops.linear(ops.activate(ops.linear(xg, layer.g_down), Activation.SIGMOID), layer.g_up)
    value = ops.linear(xv, layer.v)
    if first_value is None:
        first_value = value
    else:
        share = ops.activate(ops.linear(ops.linear(xv, layer.v_down), layer.v_up), Activation.SIGMOID)
        value = ops.add(value, ops.mul(ops.add(first_value, ops.scale(value, -1.0)), share))
    r, k = ops.linear(xr, layer.r), ops.linear(xk, layer.k)
    mixed = ops.wkv7(r, decay, k, value, rate, layer.wkv, batch, index)
    return ops.linear(ops.mul(mixed, gate), layer.out), first_value


def channel_mix(c: Rwkv7Config, layer: Rwkv7Layer, ops: OpSet, x: Value, batch: Any, index: int) -> Value:
    shifted = ops.causal_conv(x, layer.mlp_shift, None, batch, index, first=len(INPUTS) * c.hidden)
    return ops.linear(ops.activate(ops.linear(shifted, layer.up), Activation.RELU_SQUARED), layer.down)

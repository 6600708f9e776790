"""Decoders with layer norms: GPT-2, and the families between it and Llama.

They differ in where positions enter (a table, rotation, slopes), in whether attention and MLP follow each other or both
read the layer's input, and in numbers and names. The wiring stands here, once; a family's own file reads its numbers
(`read_config`) and lists its names (`GPTTensors`)."""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from quire.models.config import ModelConfig
from quire.models.loading import Affine, EmbeddingTable, Linear, LoadedModel, TensorSpecs, load_weights
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import REQUIRED, CheckpointConfig, Required

QKV_APART = "qkv_apart"  # true in GGUF files, whose converter puts q, k and v, stored head by head, one after the other
# Older exports stored causal masks, and what follows from the configuration.
UNUSED = r".*\.(attn|attention|self_attention)\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(ModelConfig):
    intermediate: int
    activation: Activation
    eps: float  # of the norms
    scale: float  # of the scores
    tied: bool  # the head is the embedding table
    bias: bool = True  # of the linear layers in a layer, where a family has the choice
    gated: bool = False  # the MLP multiplies its activation with a second product
    parallel: bool = False  # attention and MLP both read the layer's input, each or together behind a norm
    norms_after: bool = False  # of the sums, where others have them before attention and MLP
    head_norms: bool = False  # norms of q and k are of every head, and not of all together
    clip: float = 0.0  # q, k and v are kept in -clip .. clip; 0 keeps them as they are
    rope: RopeSpec | None = None
    rotated: tuple[bool, ...] | None = None  # for each layer: whether queries and keys turn; None: all
    logit_scale: float = 1.0
    slopes: tuple[float, ...] = ()  # for each head: how fast its scores fall with the distance


# What configurations call the numbers that all have.
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def read_config(
    hf: CheckpointConfig,
    *,
    rotary: CheckpointConfig | None = None,
    default_length: int | Required = REQUIRED,
    **numbers: Any,
) -> GPTConfig:
    """What all have; the fields in `numbers` are the family's own, besides or instead. `rotary` has the keys of the
    rotation, for families that rotate."""
    hidden, layers, heads = (_number(hf, keys) for keys in (HIDDEN, LAYERS, HEADS))
    max_position = _number(hf, LENGTH, default_length)
    head_dim = hf.int("head_dim", hidden // max(heads, 1))
    rope = read_rope(rotary, head_dim, max_position) if rotary is not None else None
    common = {
        "architecture": hf.architecture,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "intermediate": 4 * hidden,
        "vocab": hf.int("vocab_size"),
        "max_position": rope.default_length if rope else max_position,
        "max_length": rope.max_length if rope else max_position,
        "windows": (0,) * layers,
        "eps": 1e-5,
        "scale": 1 / sqrt(max(head_dim, 1)),
        "tied": hf.bool("tie_word_embeddings", False),
        "rope": rope,
    }
    return GPTConfig(**{**common, **numbers})


def _number(hf: CheckpointConfig, keys: tuple[str, ...], default: int | Required = REQUIRED) -> int:
    return hf.int(next((key for key in keys if key in hf), keys[0]), default)


@dataclass(frozen=True, slots=True)
class GPTTensors:
    """Where a family's checkpoints keep what."""

    base: str  # what all names but the head's begin with; where none does, it is left out
    layers: str  # what follows before the number of a layer
    top: TensorSpecs  # the fields of `GPTWeights`
    layer: TensorSpecs  # the fields of `GPTLayer`
    head: str = "lm_head"
    head_bias: bool = False  # only where the head is not the embedding table


@dataclass(frozen=True, slots=True)
class GPTLayer:
    attn_norm: Affine
    qkv: PackedWeight
    out: PackedWeight
    up: PackedWeight  # and the gate before it
    down: PackedWeight
    mlp_norm: Affine | None = None  # None: the MLP reads what attention reads
    q_norm: Affine | None = None
    k_norm: Affine | None = None


@dataclass(frozen=True, slots=True)
class GPTWeights:
    embed: Any
    layers: list[GPTLayer]
    head: PackedWeight
    norm: Affine | None = None
    positions: Any = None  # a row for each
    embed_norm: Affine | None = None
    embed_in: PackedWeight | None = None  # from the columns of the embedding to those of the layers
    embed_out: PackedWeight | None = None  # and back
    rope: Any = None
    slopes: Any = None


def load_model(
    ops: OpSet, checkpoint: Checkpoint, config: GPTConfig, max_model_len: int, names: GPTTensors
) -> LoadedModel:
    base = names.base if any(name.startswith(names.base) for name in checkpoint.names()) else ""
    embed = names.top["embed"]
    assert isinstance(embed, EmbeddingTable) and not (config.tied and names.head_bias)
    head = Linear(
        {base + embed.name if config.tied else names.head: config.vocab},
        embed.num_columns,
        bias=names.head_bias,
        keep=Keep.EIGHT_BITS,
    )
    inside = {base: names.top} | {f"{base}{names.layers}.{i}.": names.layer for i in range(config.layers)}
    unused = "|".join([UNUSED, *([f"{names.head}.weight"] if config.tied else [])])
    outer, (top, *layers) = load_weights(ops, checkpoint, {"head": head}, inside, unused)
    weights = GPTWeights(
        **outer,
        **top,
        layers=[GPTLayer(**layer) for layer in layers],
        rope=ops.frequencies(*frequencies(config.rope, max_model_len)) if config.rope else None,
        slopes=ops.vector(stored_floats("slopes", np.array(config.slopes))) if config.slopes else None,
    )
    return LoadedModel(config, partial(forward, config, weights), [outer, top, *layers])


def forward(c: GPTConfig, w: GPTWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope) if c.rope else None
    x = ops.embedding(batch.ids, w.embed)
    if w.embed_in is not None:
        x = ops.linear(x, w.embed_in)
    if w.positions is not None:
        x = ops.add(x, ops.embedding(batch.positions, w.positions))
    if w.embed_norm is not None:
        x = ops.layer_norm(x, *w.embed_norm, c.eps)
    for index in range(c.layers):
        x = block(c, w, index, ops, x, angles, batch)
    if w.norm is not None:
        x = ops.layer_norm(x, *w.norm, c.eps)
    if w.embed_out is not None:
        x = ops.linear(x, w.embed_out)
    return ops.logits(x if c.logit_scale == 1 else ops.scale(x, c.logit_scale), w.head, batch)


def block(c: GPTConfig, w: GPTWeights, index: int, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    layer = w.layers[index]
    if c.norms_after:
        assert layer.mlp_norm is not None
        x = ops.layer_norm(ops.add(x, attention(c, w, index, ops, x, angles, batch)), *layer.attn_norm, c.eps)
        return ops.layer_norm(ops.add(x, mlp(c, layer, ops, x)), *layer.mlp_norm, c.eps)
    normed = ops.layer_norm(x, *layer.attn_norm, c.eps)
    attended = ops.add(x, attention(c, w, index, ops, normed, angles, batch))
    if layer.mlp_norm is not None:
        normed = ops.layer_norm(x if c.parallel else attended, *layer.mlp_norm, c.eps)
    return ops.add(attended, mlp(c, layer, ops, normed))


def attention(c: GPTConfig, w: GPTWeights, index: int, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    layer = w.layers[index]
    qkv = ops.linear(x, layer.qkv)
    q, k, v = ops.split(ops.clamp(qkv, c.clip) if c.clip else qkv, (c.q_size, c.kv_size, c.kv_size))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = ops.layer_norm(q, *layer.q_norm, c.eps, c.heads if c.head_norms else 1)
        k = ops.layer_norm(k, *layer.k_norm, c.eps, c.kv_heads if c.head_norms else 1)
    if c.rope and (c.rotated is None or c.rotated[index]):
        q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
    ops.write_kv(k, v, batch, index)
    found = ops.paged_attention(q, batch, index, c.head_dim, c.scale, c.windows[index], slopes=w.slopes)
    return ops.linear(found, layer.out)


def mlp(c: GPTConfig, layer: GPTLayer, ops: OpSet, x: Value) -> Value:
    act = ops.activate_and_mul if c.gated else ops.activate
    return ops.linear(act(ops.linear(x, layer.up), c.activation), layer.down)

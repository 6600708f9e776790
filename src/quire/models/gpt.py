"""Decoders with layer norms: GPT-2, and the families between it and Llama.

They differ in position embeddings (learned, rope, ALiBi), in whether attention and MLP follow each other or both read
the layer's input, and in sizes and tensor names. The forward pass is here; a family's own file reads its configuration
(`read_config`) and lists its tensors (`GPTTensors`)."""

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

QKV_UNGROUPED = "qkv_ungrouped"  # config key of GGUF files: their converter undoes the grouping of q, k and v by heads
# Buffers of older exports: causal masks, rotary frequencies and sinusoidal positions.
UNUSED = (
    r".*\.(attn|attention|self_attention)\.(bias|masked_bias|causal_mask)|.*\.rotary_emb\.inv_freq|.*\.relative_pe\.slopes"
    r"|(.*\.)?embed_positions\.weights"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(ModelConfig):
    intermediate: int
    activation: Activation
    eps: float  # of the norms
    scale: float  # of the scores
    tied: bool  # the head is the embedding table
    bias: bool = True  # of the linear layers in a layer, where the configuration has a choice
    gated: bool = False  # the MLP has a gate
    parallel: bool = False  # attention and MLP both read the layer's input, behind one norm or one each
    post_norm: bool = False  # norms stand after residual sums, not before attention and MLP
    head_norms: bool = False  # q and k are normed head by head, not whole
    clip_qkv: float = 0.0  # q, k and v are clipped to -clip_qkv .. clip_qkv; 0: they are not
    rope: RopeSpec | None = None
    rotated: tuple[bool, ...] | None = None  # for each layer: whether queries and keys have rope; None: all do
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    slopes: tuple[float, ...] = ()  # ALiBi, for each head


# The keys of config.json for the sizes that all have.
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def read_config(
    hf: CheckpointConfig,
    *,
    rotary: CheckpointConfig | None = None,
    default_length: int | Required = REQUIRED,
    **fields: Any,
) -> GPTConfig:
    """The fields that all families share; `fields` adds to them or replaces them. `rotary` has the keys of rope, in
    families that have it."""
    hidden, layers, heads = (_size(hf, keys) for keys in (HIDDEN, LAYERS, HEADS))
    max_position = _size(hf, LENGTH, default_length)
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
    return GPTConfig(**{**common, **fields})


def _size(hf: CheckpointConfig, keys: tuple[str, ...], default: int | Required = REQUIRED) -> int:
    return hf.int(next((key for key in keys if key in hf), keys[0]), default)


@dataclass(frozen=True, slots=True)
class GPTTensors:
    """The tensors of a family's checkpoints."""

    base: str  # prefix of all names but the head's; some checkpoints leave it out
    layers: str  # what stands between the base and the number of a layer
    top: TensorSpecs  # the fields of `GPTWeights`
    layer: TensorSpecs  # the fields of `GPTLayer`
    head: str = "lm_head"
    head_bias: bool = False  # only where the head is not tied to the embedding


@dataclass(frozen=True, slots=True)
class GPTLayer:
    attn_norm: Affine
    qkv: PackedWeight
    out: PackedWeight
    up: PackedWeight  # with the gate stacked before it, if there is one
    down: PackedWeight
    mlp_norm: Affine | None = None  # None: the MLP reads the input of attention
    q_norm: Affine | None = None
    k_norm: Affine | None = None


@dataclass(frozen=True, slots=True)
class GPTWeights:
    embed: Any
    layers: list[GPTLayer]
    head: PackedWeight
    norm: Affine | None = None
    positions: Any = None  # learned position embeddings
    embed_norm: Affine | None = None
    embed_in: PackedWeight | None = None  # projects embeddings to the width of the layers
    embed_out: PackedWeight | None = None  # projects hidden states to the width of the embedding
    rope: Any = None
    slopes: Any = None


def load_model(
    ops: OpSet, checkpoint: Checkpoint, config: GPTConfig, max_model_len: int, tensors: GPTTensors
) -> LoadedModel:
    base = tensors.base if any(name.startswith(tensors.base) for name in checkpoint.names()) else ""
    embed = tensors.top["embed"]
    assert isinstance(embed, EmbeddingTable) and not (config.tied and tensors.head_bias)
    head = Linear(
        {base + embed.name if config.tied else tensors.head: config.vocab},
        embed.num_columns,
        bias=tensors.head_bias,
        keep=Keep.EIGHT_BITS,
    )
    inside = {base: tensors.top} | {f"{base}{tensors.layers}.{i}.": tensors.layer for i in range(config.layers)}
    unused = "|".join([UNUSED, *([f"{tensors.head}.weight"] if config.tied else [])])
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
    if c.embed_scale != 1:
        x = ops.scale(x, c.embed_scale)
    if w.embed_in is not None:
        x = ops.linear(x, w.embed_in)
    if w.positions is not None:
        x = ops.add(x, ops.embedding(batch.positions, w.positions))
    if w.embed_norm is not None:
        x = ops.layer_norm(x, *w.embed_norm, c.eps)
    for index in range(c.layers):
        ops.tap(x, index)
        x = block(c, w, index, ops, x, angles, batch)
    ops.tap(x, c.layers)
    if w.norm is not None:
        x = ops.layer_norm(x, *w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    if w.embed_out is not None:
        x = ops.linear(x, w.embed_out)
    return ops.logits(x if c.logit_scale == 1 else ops.scale(x, c.logit_scale), w.head, batch)


def block(c: GPTConfig, w: GPTWeights, index: int, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    layer = w.layers[index]
    if c.post_norm:
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
    q, k, v = ops.split(ops.clamp(qkv, c.clip_qkv) if c.clip_qkv else qkv, (c.q_size, c.kv_size, c.kv_size))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = ops.layer_norm(q, *layer.q_norm, c.eps, c.heads if c.head_norms else 1)
        k = ops.layer_norm(k, *layer.k_norm, c.eps, c.kv_heads if c.head_norms else 1)
    if c.rope and (c.rotated is None or c.rotated[index]):
        q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
    ops.write_kv(k, v, batch, index)
    attended = ops.paged_attention(q, batch, index, c.head_dim, c.scale, c.windows[index], slopes=w.slopes)
    return ops.linear(attended, layer.out)


def mlp(c: GPTConfig, layer: GPTLayer, ops: OpSet, x: Value) -> Value:
    act = ops.activate_and_mul if c.gated else ops.activate
    return ops.linear(act(ops.linear(x, layer.up), c.activation), layer.down)

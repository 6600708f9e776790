"""ModernBERT: an encoder with rope, gated feed-forward layers, and windows in two layers of three.

Norms stand before attention and feed-forward, except before the first attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.bert_layers import ACTIVATIONS, encoder_fields, head_columns, is_classifier, label_count
from quire.models.config import EncoderConfig
from quire.models.loading import Affine, EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs, load_weights
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

BODY = "model."  # names begin with it where the checkpoint has a head
UNUSED = r"(head|decoder|classifier)\..*"  # of a masked language model, or of a classifier that reads the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    intermediate: int
    eps: float  # of the norms
    activation: Activation
    head_activation: Activation
    rope: RopeSpec  # in layers with full attention
    local_rope: RopeSpec  # in layers with a window
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    head_bias: bool


def config(hf: CheckpointConfig) -> ModernBertConfig:
    labels = label_count(hf) if is_classifier(hf) else 0
    labels_of_mean = labels > 0 and hf.expect("classifier_pooling", "cls", "mean", None) == "mean"
    hf.expect("rope_scaling", None)
    hf.expect("rope_local_scaling", None)
    hidden, layers, heads = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    head_dim, max_position = head_columns(hidden, heads), hf.int("max_position_embeddings")
    theta = hf.float("rope_theta", hf.float("global_rope_theta", 160_000.0))
    local_theta = hf.float("rope_local_base_freq", hf.float("local_rope_theta", 10_000.0))
    return ModernBertConfig(
        **encoder_fields(hf, hidden, layers, heads, max_position) | {"windows": _windows(hf, layers)},
        labels_of_mean=labels_of_mean,
        intermediate=hf.int("intermediate_size"),
        eps=hf.float("norm_eps", 1e-5),
        activation=ACTIVATIONS[hf.expect("hidden_activation", *ACTIVATIONS)],
        head_activation=ACTIVATIONS[hf.get("classifier_activation", "gelu")] if labels else Activation.GELU,
        rope=read_rope({"rope_theta": theta}, head_dim, max_position),
        local_rope=read_rope({"rope_theta": local_theta}, head_dim, max_position),
        attention_bias=hf.bool("attention_bias", False),
        mlp_bias=hf.bool("mlp_bias", False),
        norm_bias=hf.bool("norm_bias", False),
        head_bias=hf.bool("classifier_bias", False),
    )


def _windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """The windows by `layer_types`, or in all layers but every n-th. `local_attention` counts both sides together."""
    interval = hf.int("global_attn_every_n_layers", 3)
    listed = hf.get("layer_types", ["sliding_attention" if i % interval else "full_attention" for i in range(layers)])
    if len(listed) != layers:
        raise BadCheckpoint(f"layer_types lists {len(listed)} layers, and there are {layers}")
    reach = hf.int("local_attention", 128) // 2
    return tuple(reach + 1 if kind == "sliding_attention" else 0 for kind in listed)


def top_specs(c: ModernBertConfig, prefix: str) -> TensorSpecs:
    head: TensorSpecs = {
        "pooler": Linear({"head.dense": c.hidden}, c.hidden, bias=c.head_bias, keep=Keep.ALL),
        "pooler_norm": LayerNorm("head.norm", c.hidden, bias=c.norm_bias),
        "head": Linear({"classifier": c.labels}, c.hidden, bias=True, keep=Keep.ALL),
    }
    return {
        "embed": EmbeddingTable(f"{prefix}embeddings.tok_embeddings", c.vocab, c.hidden),
        "norm": LayerNorm(f"{prefix}embeddings.norm", c.hidden, bias=c.norm_bias),
        "last_norm": LayerNorm(f"{prefix}final_norm", c.hidden, bias=c.norm_bias),
        **(head if c.labels and not c.labels_of_mean else {}),
    }


def layer_specs(c: ModernBertConfig, layer: int) -> TensorSpecs:
    return {
        **({"attn_norm": LayerNorm("attn_norm", c.hidden, bias=c.norm_bias)} if layer else {}),
        "qkv": Linear({"attn.Wqkv": 3 * c.hidden}, c.hidden, bias=c.attention_bias),
        "out": Linear({"attn.Wo": c.hidden}, c.hidden, bias=c.attention_bias),
        "mlp_norm": LayerNorm("mlp_norm", c.hidden, bias=c.norm_bias),
        "gate_up": Linear({"mlp.Wi": 2 * c.intermediate}, c.hidden, bias=c.mlp_bias),
        "down": Linear({"mlp.Wo": c.hidden}, c.intermediate, bias=c.mlp_bias),
    }


@dataclass(frozen=True, slots=True)
class ModernBertLayer:
    qkv: PackedWeight
    out: PackedWeight
    mlp_norm: Affine
    gate_up: PackedWeight
    down: PackedWeight
    attn_norm: Affine | None = None


@dataclass(frozen=True, slots=True)
class ModernBertWeights:
    embed: Any
    norm: Affine
    layers: list[ModernBertLayer]
    last_norm: Affine
    rope: Any  # rotary frequencies
    local_rope: Any
    pooler: PackedWeight | None = None
    pooler_norm: Affine | None = None
    head: PackedWeight | None = None


def load(ops: OpSet, checkpoint: Checkpoint, config: ModernBertConfig, max_model_len: int) -> LoadedModel:
    prefix = BODY if any(name.startswith(BODY) for name in checkpoint.names()) else ""
    by_prefix = {f"{prefix}layers.{layer}.": layer_specs(config, layer) for layer in range(config.layers)}
    top, layers = load_weights(ops, checkpoint, top_specs(config, prefix), by_prefix, UNUSED)
    loaded = weights(ops, config, top, layers, max_model_len)
    return LoadedModel(config, partial(forward, config, loaded), [top, *layers])


def weights(
    ops: OpSet, c: ModernBertConfig, top: Mapping[str, Any], layers: list[dict[str, Any]], max_model_len: int
) -> ModernBertWeights:
    return ModernBertWeights(
        **top,
        layers=[ModernBertLayer(**layer) for layer in layers],
        rope=ops.frequencies(*frequencies(c.rope, max_model_len)),
        local_rope=ops.frequencies(*frequencies(c.local_rope, max_model_len)),
    )


def forward(c: ModernBertConfig, w: ModernBertWeights, ops: OpSet, batch: Any) -> Value:
    """-> the hidden states, or a classifier's logits, of rows batch.logit_rows."""
    angles = rope_angles(w, ops, batch)
    x = ops.layer_norm(ops.embedding(batch.ids, w.embed), *w.norm, c.eps)
    for layer, window in zip(w.layers, c.windows, strict=True):
        q, k, v = rotated_qkv(c, layer, ops, x, angles[window > 0])
        attended = ops.attention(q, k, v, batch, c.head_dim, 1 / sqrt(c.head_dim), window=window)
        x = ops.add(x, ops.linear(attended, layer.out))
        x = ops.add(x, mlp(c, layer, ops, x))
    x = ops.layer_norm(x, *w.last_norm, c.eps)
    return ops.rows(x, batch) if w.head is None else head_logits(c, w, ops, x, batch)


def rope_angles(w: ModernBertWeights, ops: OpSet, batch: Any) -> dict[bool, Value]:
    """The angles of layers without a window, and of layers with one."""
    return {local: ops.rope_angles(batch.positions, w.local_rope if local else w.rope) for local in (False, True)}


def rotated_qkv(c: ModernBertConfig, layer: ModernBertLayer, ops: OpSet, x: Value, angles: Value) -> tuple[Value, ...]:
    h = x if layer.attn_norm is None else ops.layer_norm(x, *layer.attn_norm, c.eps)
    q, k, v = ops.split(ops.linear(h, layer.qkv), (c.hidden, c.hidden, c.hidden))
    return ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim), v


def mlp(c: ModernBertConfig, layer: ModernBertLayer, ops: OpSet, x: Value) -> Value:
    gated = ops.activate_and_mul(ops.linear(ops.layer_norm(x, *layer.mlp_norm, c.eps), layer.gate_up), c.activation)
    return ops.linear(gated, layer.down)


def head_logits(c: ModernBertConfig, w: ModernBertWeights, ops: OpSet, x: Value, batch: Any) -> Value:
    assert w.pooler is not None and w.pooler_norm is not None and w.head is not None
    pooled = ops.activate(ops.linear(x, w.pooler), c.head_activation)
    return ops.logits(ops.layer_norm(pooled, *w.pooler_norm, c.eps), w.head, batch)

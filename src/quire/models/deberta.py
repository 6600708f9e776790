"""DeBERTa v2 and v3: BERT whose scores also read the distance of two tokens (disentangled attention).

A query is multiplied by a key of the distance, and a key by a query of the distance. These keys and queries are made of
one table of embeddings, by the layer's own matrices: they are computed when the model is loaded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.models.bert_layers import (
    ACTIVATIONS,
    BERT_LAYER,
    BertLayer,
    after_attention,
    classifier_specs,
    encoder_fields,
    head_columns,
    layer_specs,
    rows_or_labels,
)
from quire.models.config import EncoderConfig
from quire.models.loading import Affine, EmbeddingTable, LayerNorm, LoadedModel, TensorSpec, TensorSpecs, load_weights
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import PackedHeads, PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

BODY = "deberta."  # tensor names begin with it where the checkpoint has a head
LAYERS = "encoder.layer."
LAYER = BERT_LAYER | {part[0]: f"attention.self.{part}_proj" for part in ("query", "key", "value")}
UNUSED = (
    r".*\.position_ids|(.*\.)?pooler\..*|cls\..*|lm_predictions\..*|mask_predictions\..*|.*rotary.*"
    r"|(deberta\.)?embeddings\.position_embeddings\.weight"
)
BOTH_WAYS = {"c2p", "p2c"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaConfig(EncoderConfig):
    intermediate: int
    eps: float  # of the norms
    activation: Activation
    pooler_activation: Activation
    span: int  # distances -span .. span - 1 have embeddings, or buckets of distances
    buckets: int  # 0: every distance is its own
    max_distance: int  # that the last bucket begins before
    normed_distances: bool  # the table of embeddings is normed
    shared_key: bool  # queries and keys of distances are computed by the matrices of those of tokens


def config(hf: CheckpointConfig) -> DebertaConfig:
    hidden, layers, heads = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    head_dim = head_columns(hidden, heads)
    hf.expect("relative_attention", True)
    hf.expect("position_biased_input", False)
    hf.expect("type_vocab_size", 0, None)
    hf.expect("conv_kernel_size", 0, None)
    hf.expect("embedding_size", hidden, None)
    hf.expect("attention_head_size", head_dim, None)
    ways = hf.get("pos_att_type")
    if {*(ways.split("|") if isinstance(ways, str) else ways or ())} != BOTH_WAYS:
        hf.expect("pos_att_type", "p2c|c2p")
    longest, buckets = hf.int("max_position_embeddings"), max(hf.int("position_buckets", -1), 0)
    distance = hf.int("max_relative_positions", -1)
    distance = distance if distance > 0 else longest
    if buckets and not 2 < buckets < 2 * distance - 2:
        raise BadCheckpoint(f"position_buckets is {buckets}, and max_relative_positions {distance}")
    return DebertaConfig(
        **encoder_fields(hf, hidden, layers, heads, longest),
        intermediate=hf.int("intermediate_size"),
        eps=hf.float("layer_norm_eps", 1e-7),
        activation=ACTIVATIONS[hf.expect("hidden_act", *ACTIVATIONS)],
        pooler_activation=ACTIVATIONS[hf.expect("pooler_hidden_act", *ACTIVATIONS, None) or "gelu"],
        span=buckets or distance,
        buckets=buckets,
        max_distance=distance,
        normed_distances="layer_norm" in hf.str("norm_rel_ebd", "none").lower(),
        shared_key=hf.bool("share_att_key", False),
    )


def distance_rows(c: DebertaConfig, length: int) -> NDArray[np.int32]:
    """[2 * length + 1]: the row of the table for each distance -length .. length of a key before its query.

    Up to half as many as there are buckets, each distance has its own; beyond, they grow with the logarithm."""
    distance = np.arange(-length, length + 1)
    if c.buckets:
        middle = c.buckets // 2
        far = np.maximum(np.abs(distance), middle).astype(np.float32)
        steps = np.log(far / middle) / np.log(np.float32((c.max_distance - 1) / middle)) * (middle - 1)
        bucket = np.sign(distance) * (np.ceil(steps) + middle)
        distance = np.where(np.abs(distance) <= middle, distance, bucket).astype(np.int64)
    return np.clip(distance + c.span, 0, 2 * c.span - 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class DistanceHeads:
    """A matrix for each head, [2 * span, head_dim]: keys, or queries, of all distances."""

    c: DebertaConfig
    prefix: str
    linear: str

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.c.hidden
        yield f"{self.prefix}encoder.rel_embeddings.weight", (2 * self.c.span, hidden)
        yield f"{self.linear}.weight", (hidden, hidden)
        yield f"{self.linear}.bias", (hidden,)
        if self.c.normed_distances:
            yield f"{self.prefix}encoder.LayerNorm.weight", (hidden,)
            yield f"{self.prefix}encoder.LayerNorm.bias", (hidden,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedHeads:
        rows, weight, bias, *norm = (dequantize(tensor).astype(np.float64) for tensor in tensors)
        rows, weight = rows.reshape(-1, self.c.hidden), weight.reshape(self.c.hidden, self.c.hidden)
        if norm:
            centered = rows - rows.mean(axis=1, keepdims=True)
            deviation = np.sqrt((centered * centered).mean(axis=1, keepdims=True) + self.c.eps)
            rows = centered / deviation * norm[0].ravel() + norm[1].ravel()
        made = (rows @ weight.T + bias.ravel()).astype(np.float32).reshape(len(rows), self.c.heads, -1)
        return ops.pack_heads([stored_floats(self.linear, np.ascontiguousarray(head)) for head in made.swapaxes(0, 1)])


def top_specs(c: DebertaConfig, prefix: str) -> TensorSpecs:
    specs: dict[str, TensorSpec] = {
        "embed": EmbeddingTable(f"{prefix}embeddings.word_embeddings", c.vocab, c.hidden),
        "norm": LayerNorm(f"{prefix}embeddings.LayerNorm", c.hidden),
    }
    parts = ("key_proj", "query_proj") if c.shared_key else ("pos_key_proj", "pos_query_proj")
    for layer in range(c.layers):
        for ours, part in zip(("keys", "queries"), parts, strict=True):
            name = f"{prefix}{LAYERS}{layer}.attention.self.{part}"
            specs[f"distance_{ours}.{layer}"] = DistanceHeads(c, prefix, name)
    return {**specs, **classifier_specs("pooler.dense", "classifier", c.hidden, c.labels)}


@dataclass(frozen=True, slots=True)
class DebertaLayer(BertLayer):
    distance_keys: PackedHeads
    distance_queries: PackedHeads


@dataclass(frozen=True, slots=True)
class DebertaWeights:
    embed: Any
    norm: Affine
    layers: list[DebertaLayer]
    rows: NDArray[np.int32]  # of the table of distances
    pooler: PackedWeight | None = None
    head: PackedWeight | None = None


def load(ops: OpSet, checkpoint: Checkpoint, config: DebertaConfig, max_model_len: int) -> LoadedModel:
    prefix = BODY if any(name.startswith(BODY) for name in checkpoint.names()) else ""
    by_prefix = {
        f"{prefix}{LAYERS}{layer}.": layer_specs(LAYER, config.hidden, config.intermediate)
        for layer in range(config.layers)
    }
    top, layers = load_weights(ops, checkpoint, top_specs(config, prefix), by_prefix, UNUSED)
    made = [
        DebertaLayer(**layer, **{ours: top[f"{ours}.{index}"] for ours in ("distance_keys", "distance_queries")})
        for index, layer in enumerate(layers)
    ]
    whole = {name: weight for name, weight in top.items() if not name.startswith("distance_")}
    weights = DebertaWeights(**whole, layers=made, rows=distance_rows(config, max_model_len))
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def forward(c: DebertaConfig, w: DebertaWeights, ops: OpSet, batch: Any) -> Value:
    """-> the hidden states, or a classifier's logits, of rows batch.logit_rows."""
    x = ops.layer_norm(ops.embedding(batch.ids, w.embed), *w.norm, c.eps)
    scale = 1 / sqrt(c.head_dim * (1 + len(BOTH_WAYS)))
    for layer in w.layers:
        q, k, v = ops.split(ops.linear(x, layer.qkv), (c.hidden, c.hidden, c.hidden))
        by_query, by_key = ops.linear_heads(q, layer.distance_keys), ops.linear_heads(k, layer.distance_queries)
        attended = ops.disentangled_attention(q, k, v, by_query, by_key, w.rows, batch, c.head_dim, scale)
        x = after_attention(layer, ops, x, attended, c.activation, c.eps)
    return rows_or_labels(w.pooler, w.head, c.pooler_activation, ops, x, batch)

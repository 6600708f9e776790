"""T5, T5 1.1, FLAN-T5, mT5 and umT5.

Positions enter as relative position biases: a table for each head says what is added to a score, by the distance of the
two tokens, in all layers alike; in umT5, each layer has its own. Distances are sorted into buckets that widen with the
distance, and all beyond `relative_attention_max_distance` share one. So a table of that many distances either way is
enough. Scores are not scaled, and linear layers have no biases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.models.config import Seq2SeqConfig
from quire.models.loading import EmbeddingTable, Linear, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.seq2seq import read_seq2seq, write_source
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

MAX_TOKENS = 1 << 20  # of a source and its answer: the model has no limit, so memory is the only one
# The embedding under its other names, which older exports stored as well, and a bias that was never used.
UNUSED = (
    r"(encoder|decoder)\.embed_tokens\.weight|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\..*"
)
MAY_SCALE_LOGITS = ("T5ForConditionalGeneration", "UMT5ForConditionalGeneration")
BIASES_IN_EVERY_LAYER = ("UMT5ForConditionalGeneration",)
BIASES = "SelfAttention.relative_attention_bias"  # in the first part of a layer
FEED_FORWARD = {
    "relu": (False, Activation.RELU),
    "gelu": (False, Activation.GELU),
    "silu": (False, Activation.SILU),
    "gated-relu": (True, Activation.RELU),
    "gated-gelu": (True, Activation.GELU_TANH),
    "gated-silu": (True, Activation.SILU),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(Seq2SeqConfig):
    intermediate: int
    eps: float  # of the norms
    gated: bool  # the feed-forward layer has a gate
    activation: Activation
    buckets: int
    max_distance: int
    own_biases: bool  # every layer has its own table of biases, not only the first
    logit_scale: float


def config(hf: CheckpointConfig) -> T5Config:
    gated, activation = FEED_FORWARD[hf.expect("feed_forward_proj", *FEED_FORWARD, None) or "relu"]
    hidden, layers, heads = hf.int("d_model"), hf.int("num_layers"), hf.int("num_heads")
    decoder_layers = hf.int("num_decoder_layers", layers)
    buckets, max_distance = (
        hf.int("relative_attention_num_buckets", 32),
        hf.int("relative_attention_max_distance", 128),
    )
    if buckets < 4 or buckets % 2 or max_distance <= buckets // 2:
        raise BadCheckpoint(f"{hf.source}: {buckets} buckets for distances up to {max_distance}")
    return T5Config(
        architecture=hf.architecture,
        hidden=hidden,
        layers=decoder_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hf.int("d_kv"),
        vocab=hf.int("vocab_size"),
        max_position=2 * hf.int("n_positions", 512),
        max_length=MAX_TOKENS,
        windows=(0,) * decoder_layers,
        seq2seq=read_seq2seq(hf, MAX_TOKENS, MAX_TOKENS),
        encoder_layers=layers,
        encoder_heads=heads,
        intermediate=hf.int("d_ff"),
        eps=hf.float("layer_norm_epsilon", 1e-6),
        gated=gated,
        activation=activation,
        buckets=buckets,
        max_distance=max_distance,
        own_biases=hf.architecture in BIASES_IN_EVERY_LAYER,
        logit_scale=hidden**-0.5 if _scales_logits(hf) else 1.0,
    )


def _scales_logits(hf: CheckpointConfig) -> bool:
    """The first T5 does. Configurations of later ones say that the head is not the embedding table, meaning this."""
    scales = hf.architecture in MAY_SCALE_LOGITS
    return scales and hf.bool("scale_decoder_outputs", hf.bool("tie_word_embeddings", True))


def bucket(distance: NDArray[np.int64], both_ways: bool, num_buckets: int, max_distance: int) -> NDArray[np.int64]:
    """The bucket of (key position - query position). Unless `both_ways`, keys after the query are in bucket 0."""
    first = np.zeros_like(distance)
    if both_ways:
        num_buckets //= 2
        first = np.where(distance > 0, num_buckets, 0)
        size = np.abs(distance)
    else:
        size = np.maximum(-distance, 0)
    exact = num_buckets // 2  # buckets of a single distance
    ratio = np.maximum(size, 1).astype(np.float32) / exact
    wide = exact + (np.log(ratio) / log(max_distance / exact) * (num_buckets - exact)).astype(np.int64)
    return first + np.where(size < exact, size, np.minimum(wide, num_buckets - 1))


@dataclass(frozen=True, slots=True)
class RelativePositionBias:
    """The bias of scores for every distance up to `max_distance` either way, from a stored [buckets, heads]."""

    name: str
    heads: int
    buckets: int
    max_distance: int
    both_ways: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.buckets, self.heads)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        stored = dequantize(tensors[0]).reshape(self.buckets, self.heads)
        distance = np.arange(-self.max_distance, self.max_distance + 1)
        return ops.biases(stored[bucket(distance, self.both_ways, self.buckets, self.max_distance)].T)


def top_specs(c: T5Config, head: str) -> TensorSpecs:
    return {
        "embed": EmbeddingTable("shared", c.vocab, c.hidden),
        "encoder_norm": Vector("encoder.final_layer_norm", c.hidden),
        "decoder_norm": Vector("decoder.final_layer_norm", c.hidden),
        "head": Linear({head: c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }


def layer_specs(c: Any, index: int, feed_forward: int) -> TensorSpecs:
    """`feed_forward`: the index of the feed-forward part in a layer, which is the last."""
    biases = RelativePositionBias(f"layer.0.{BIASES}", c.heads, c.buckets, c.max_distance, both_ways=feed_forward == 1)
    ff = f"layer.{feed_forward}"
    up = [f"{ff}.DenseReluDense.{name}" for name in (("wi_0", "wi_1") if c.gated else ("wi",))]
    return {
        "attn_norm": Vector("layer.0.layer_norm", c.hidden),
        **({"biases": biases} if c.own_biases or index == 0 else {}),
        "qkv": Linear({f"layer.0.SelfAttention.{x}": c.q_size for x in "qkv"}, c.hidden),
        "out": Linear({"layer.0.SelfAttention.o": c.hidden}, c.q_size),
        "mlp_norm": Vector(f"{ff}.layer_norm", c.hidden),
        "up": Linear(dict.fromkeys(up, c.intermediate), c.hidden),
        "down": Linear({f"{ff}.DenseReluDense.wo": c.hidden}, c.intermediate),
    }


def cross_specs(c: T5Config) -> TensorSpecs:
    return {
        "cross_norm": Vector("layer.1.layer_norm", c.hidden),
        "cross_q": Linear({"layer.1.EncDecAttention.q": c.q_size}, c.hidden),
        "cross_kv": Linear({f"layer.1.EncDecAttention.{x}": c.kv_size for x in "kv"}, c.hidden),
        "cross_out": Linear({"layer.1.EncDecAttention.o": c.hidden}, c.q_size),
    }


@dataclass(frozen=True, slots=True)
class T5Layer:
    attn_norm: Any
    qkv: PackedWeight
    out: PackedWeight
    mlp_norm: Any
    up: PackedWeight  # with the gate stacked before it, if there is one
    down: PackedWeight
    biases: Any = None  # of scores, by relative position; None: those of the first layer


@dataclass(frozen=True, slots=True, kw_only=True)
class T5DecoderLayer(T5Layer):
    cross_norm: Any
    cross_q: PackedWeight
    cross_kv: PackedWeight
    cross_out: PackedWeight


@dataclass(frozen=True, slots=True)
class T5Weights:
    embed: Any
    encoder_norm: Any
    decoder_norm: Any
    head: PackedWeight
    encoder: list[T5Layer]
    decoder: list[T5DecoderLayer]


def load(ops: OpSet, checkpoint: Checkpoint, config: T5Config, max_model_len: int) -> LoadedModel:
    head = "lm_head" if "lm_head.weight" in checkpoint.names() else "shared"
    encoder = {f"encoder.block.{index}.": layer_specs(config, index, 1) for index in range(config.encoder_layers)}
    decoder = {
        f"decoder.block.{index}.": {**layer_specs(config, index, 2), **cross_specs(config)}
        for index in range(config.layers)
    }
    top, layers = load_weights(ops, checkpoint, top_specs(config, head), encoder | decoder, UNUSED)
    weights = T5Weights(
        **top,
        encoder=[T5Layer(**layer) for layer in layers[: config.encoder_layers]],
        decoder=[T5DecoderLayer(**layer) for layer in layers[config.encoder_layers :]],
    )
    return LoadedModel(
        config,
        partial(forward, config, weights),
        [top, *layers],
        encode=partial(encode, config, weights),
    )


def encode(c: T5Config, w: T5Weights, ops: OpSet, batch: Any) -> Value:
    x = encode_tokens(c, ops.embedding(batch.ids, w.embed), w.encoder, w.encoder_norm, ops, batch)
    return write_source(c, [layer.cross_kv for layer in w.decoder], ops, x, batch)


def encode_tokens(c: Any, x: Value, layers: Sequence[T5Layer], norm: Any, ops: OpSet, batch: Any) -> Value:
    """`c`: a T5Config, or that of an encoder alone."""
    for layer in layers:
        q, k, v = ops.split(ops.linear(ops.rms_norm(x, layer.attn_norm, c.eps), layer.qkv), (c.q_size,) * 3)
        biases = layers[0].biases if layer.biases is None else layer.biases
        attended = ops.attention(q, k, v, batch, c.head_dim, 1.0, biases=biases)
        x = ops.add(x, ops.linear(attended, layer.out))
        x = ops.add(x, feed_forward(c, layer, ops, x))
    return ops.rms_norm(x, norm, c.eps)


def forward(c: T5Config, w: T5Weights, ops: OpSet, batch: Any) -> Value:
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.decoder):
        q, k, v = ops.split(ops.linear(ops.rms_norm(x, layer.attn_norm, c.eps), layer.qkv), (c.q_size,) * 3)
        ops.write_kv(k, v, batch, index)
        biases = w.decoder[0].biases if layer.biases is None else layer.biases
        attended = ops.paged_attention(q, batch, index, c.head_dim, 1.0, biases=biases)
        x = ops.add(x, ops.linear(attended, layer.out))
        q = ops.linear(ops.rms_norm(x, layer.cross_norm, c.eps), layer.cross_q)
        x = ops.add(x, ops.linear(ops.cross_attention(q, batch, index, c.head_dim, 1.0), layer.cross_out))
        x = ops.add(x, feed_forward(c, layer, ops, x))
    x = ops.rms_norm(x, w.decoder_norm, c.eps)
    return ops.logits(x if c.logit_scale == 1 else ops.scale(x, c.logit_scale), w.head, batch)


def feed_forward(c: Any, layer: T5Layer, ops: OpSet, x: Value) -> Value:
    act = ops.activate_and_mul if c.gated else ops.activate
    return ops.linear(act(ops.linear(ops.rms_norm(x, layer.mlp_norm, c.eps), layer.up), c.activation), layer.down)

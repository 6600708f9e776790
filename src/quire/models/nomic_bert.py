"""NomicBERT: BERT with rope and gated feed-forward layers, and without biases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models.config import EncoderConfig
from quire.models.loading import Affine, EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs, load_weights
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

UNUSED = r"(.*\.)?pooler\..*|cls\..*"  # heads that are not used
SPELLINGS = {  # the authors' key -> that of transformers
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    intermediate: int
    token_types: int  # every token is of the first
    eps: float  # of the norms
    rope: RopeSpec


def config(hf: CheckpointConfig) -> NomicBertConfig:
    hf.expect("activation_function", "swiglu", None)
    hf.expect("hidden_act", "silu", None)
    for key in ("prenorm", "parallel_block", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "causal"):
        hf.expect(key, False, None)
    hf.expect("rotary_emb_fraction", 1.0, None)
    hf.expect("rotary_emb_interleaved", False, None)
    hf.expect("moe_every_n_layers", 0, None)
    hf = hf.with_values({key: hf.get(authors) for authors, key in SPELLINGS.items() if authors in hf})
    hidden, layers, heads = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    if heads < 1 or hidden % heads:
        raise BadCheckpoint(f"{hidden} columns cannot be divided among {heads} heads")
    max_position = hf.int("max_position_embeddings", 2048)
    return NomicBertConfig(
        architecture=hf.architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=hf.int("vocab_size"),
        max_position=max_position,
        max_length=max_position,
        windows=(0,) * layers,
        intermediate=hf.int("intermediate_size"),
        token_types=hf.int("type_vocab_size", 2),
        eps=hf.float("layer_norm_eps", 1e-12),
        rope=read_rope(hf, hidden // heads, max_position, 1000.0),
    )


@dataclass(frozen=True, slots=True)
class TokenTypeRow:
    """The embedding of the first token type, at every position."""

    name: str
    config: NomicBertConfig

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.config.token_types, self.config.hidden)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        first = dequantize(tensors[0]).reshape(-1, self.config.hidden)[0]
        return ops.table(stored_floats(tensors[0].name, np.tile(first, (self.config.max_position, 1))))


def top_specs(c: NomicBertConfig) -> TensorSpecs:
    return {
        "embed": EmbeddingTable("embeddings.word_embeddings", c.vocab, c.hidden),
        "token_type": TokenTypeRow("embeddings.token_type_embeddings", c),
        "norm": LayerNorm("emb_ln", c.hidden),
    }


def layer_specs(c: NomicBertConfig) -> TensorSpecs:
    return {
        "qkv": Linear({"attn.Wqkv": 3 * c.hidden}, c.hidden),
        "out": Linear({"attn.out_proj": c.hidden}, c.hidden),
        "attn_norm": LayerNorm("norm1", c.hidden),
        "gate_up": Linear({"mlp.fc12": c.intermediate, "mlp.fc11": c.intermediate}, c.hidden),
        "down": Linear({"mlp.fc2": c.hidden}, c.intermediate),
        "mlp_norm": LayerNorm("norm2", c.hidden),
    }


@dataclass(frozen=True, slots=True)
class NomicBertLayer:
    qkv: PackedWeight
    out: PackedWeight
    attn_norm: Affine
    gate_up: PackedWeight
    down: PackedWeight
    mlp_norm: Affine


@dataclass(frozen=True, slots=True)
class NomicBertWeights:
    embed: Any
    token_type: Any
    norm: Affine
    layers: list[NomicBertLayer]
    rope: Any  # rotary frequencies


def load(ops: OpSet, checkpoint: Checkpoint, config: NomicBertConfig, max_model_len: int) -> LoadedModel:
    by_prefix = {f"encoder.layers.{layer}.": layer_specs(config) for layer in range(config.layers)}
    top, layers = load_weights(ops, checkpoint, top_specs(config), by_prefix, UNUSED)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = NomicBertWeights(**top, layers=[NomicBertLayer(**layer) for layer in layers], rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def forward(c: NomicBertConfig, w: NomicBertWeights, ops: OpSet, batch: Any) -> Value:
    """-> the hidden states of rows batch.logit_rows."""
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.add(ops.embedding(batch.ids, w.embed), ops.embedding(batch.positions, w.token_type))
    x = ops.layer_norm(x, *w.norm, c.eps)
    for layer in w.layers:
        q, k, v = ops.split(ops.linear(x, layer.qkv), (c.hidden, c.hidden, c.hidden))
        q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
        attended = ops.attention(q, k, v, batch, c.head_dim, 1 / sqrt(c.head_dim))
        x = ops.layer_norm(ops.add(x, ops.linear(attended, layer.out)), *layer.attn_norm, c.eps)
        inner = ops.activate_and_mul(ops.linear(x, layer.gate_up), Activation.SILU)
        x = ops.layer_norm(ops.add(x, ops.linear(inner, layer.down)), *layer.mlp_norm, c.eps)
    return ops.rows(x, batch)

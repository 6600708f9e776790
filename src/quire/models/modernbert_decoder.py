"""ModernBERT as a decoder (Ettin): attention is causal, and a head with a layer of its own predicts the next token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from quire.models import modernbert
from quire.models.bert_layers import ACTIVATIONS
from quire.models.loading import LayerNorm, Linear, LoadedModel, TensorSpec, TensorSpecs, load_weights
from quire.models.modernbert import ModernBertConfig, ModernBertWeights
from quire.ops.opset import Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertDecoderConfig(ModernBertConfig):
    tied: bool  # the head is the embedding table
    decoder_bias: bool


def config(hf: CheckpointConfig) -> ModernBertDecoderConfig:
    encoder = modernbert.config(hf)
    fields = {name: getattr(encoder, name) for name in encoder.__dataclass_fields__}
    reach = hf.int("local_attention", 128) // 2  # the token itself is one of them
    return ModernBertDecoderConfig(
        **fields
        | {
            "bidirectional": False,
            "windows": tuple(reach if window else 0 for window in encoder.windows),
            "head_activation": ACTIVATIONS[hf.get("classifier_activation", "gelu")],
        },
        tied=hf.bool("tie_word_embeddings", True),
        decoder_bias=hf.bool("decoder_bias", True),
    )


def top_specs(c: ModernBertDecoderConfig) -> TensorSpecs:
    table = "model.embeddings.tok_embeddings"
    head: TensorSpec = Linear(
        {table if c.tied else "decoder": c.vocab}, c.hidden, bias=c.decoder_bias, keep=Keep.EIGHT_BITS
    )
    if c.tied and c.decoder_bias:
        head = TiedHead(table, c.vocab, c.hidden)
    return {
        **modernbert.top_specs(c, modernbert.BODY),
        "pooler": Linear({"lm_head.dense": c.hidden}, c.hidden, bias=c.head_bias),
        "pooler_norm": LayerNorm("lm_head.norm", c.hidden, bias=c.norm_bias),
        "head": head,
    }


@dataclass(frozen=True, slots=True)
class TiedHead:
    """The embedding table, with the bias of the head."""

    table: str
    vocab: int
    hidden: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.table}.weight", (self.vocab, self.hidden)
        yield "decoder.bias", (self.vocab,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        weight, bias = tensors
        return ops.pack([weight], [bias], keep=Keep.EIGHT_BITS)


def layer_specs(c: ModernBertDecoderConfig, layer: int) -> TensorSpecs:
    parts = dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj"), c.hidden)
    return {**modernbert.layer_specs(c, layer), "qkv": Linear(parts, c.hidden, bias=c.attention_bias)}


def load(ops: OpSet, checkpoint: Checkpoint, config: ModernBertDecoderConfig, max_model_len: int) -> LoadedModel:
    by_prefix = {f"model.layers.{layer}.": layer_specs(config, layer) for layer in range(config.layers)}
    unused = "decoder.weight" if config.tied else ""
    top, layers = load_weights(ops, checkpoint, top_specs(config), by_prefix, unused)
    weights = modernbert.weights(ops, config, top, layers, max_model_len)
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def forward(c: ModernBertDecoderConfig, w: ModernBertWeights, ops: OpSet, batch: Any) -> Value:
    angles = modernbert.rope_angles(w, ops, batch)
    x = ops.layer_norm(ops.embedding(batch.ids, w.embed), *w.norm, c.eps)
    for index, (layer, window) in enumerate(zip(w.layers, c.windows, strict=True)):
        ops.tap(x, index)
        q, k, v = modernbert.rotated_qkv(c, layer, ops, x, angles[window > 0])
        ops.write_kv(k, v, batch, index)
        attended = ops.paged_attention(q, batch, index, c.head_dim, 1 / sqrt(c.head_dim), window)
        x = ops.add(x, ops.linear(attended, layer.out))
        x = ops.add(x, modernbert.mlp(c, layer, ops, x))
    ops.tap(x, c.layers)
    x = ops.layer_norm(x, *w.last_norm, c.eps)
    ops.tap(x, c.layers + 1)
    return modernbert.head_logits(c, w, ops, x, batch)

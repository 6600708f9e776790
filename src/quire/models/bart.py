"""BART, and the encoder-decoders that differ from it in where norms stand and in position embeddings: mBART, Marian,
Pegasus, M2M100 and NLLB."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from quire.models.activations import read_activation
from quire.models.bert_layers import BertLayer, head_columns, layer_specs
from quire.models.config import Seq2SeqConfig
from quire.models.loading import (
    Affine,
    EmbeddingTable,
    LayerNorm,
    Linear,
    LoadedModel,
    TensorSpec,
    TensorSpecs,
    load_weights,
)
from quire.models.seq2seq import read_seq2seq, write_source
from quire.ops.opset import Activation, Float32, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EPS = 1e-5  # of the norms
SKIPPED = 2  # rows before position 0 in tables of learned positions
# The shared embedding where encoder and decoder have their own, and sinusoidal positions, which are computed.
UNUSED = r"model\.shared\.weight|model\.(encoder|decoder)\.embed_(tokens|positions)\.weights?"
LAYER = {
    **{part: f"self_attn.{part}_proj" for part in "qkv"},
    "out": "self_attn.out_proj",
    "attn_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "mlp_norm": "final_layer_norm",
}


@dataclass(frozen=True, slots=True)
class BartFamily:
    """What a family does otherwise than BART, whose row is all defaults."""

    pre_norm: bool = False  # norms stand before attention and feed-forward, and behind the last layer; else after sums
    embed_norm: bool = True
    learned_positions: bool = True  # else they are sinusoidal
    tensor2tensor: bool = False  # sinusoidal as in tensor2tensor, and position 0 is the row behind the padding token's
    logits_bias: bool = True


FAMILIES = {
    "BartForConditionalGeneration": BartFamily(),
    "PLBartForConditionalGeneration": BartFamily(),
    "MBartForConditionalGeneration": BartFamily(pre_norm=True),
    "MarianMTModel": BartFamily(embed_norm=False, learned_positions=False),
    "M2M100ForConditionalGeneration": BartFamily(
        pre_norm=True, embed_norm=False, learned_positions=False, tensor2tensor=True, logits_bias=False
    ),
    "PegasusForConditionalGeneration": BartFamily(pre_norm=True, embed_norm=False, learned_positions=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(Seq2SeqConfig):
    family: BartFamily
    positions: int
    padding: int  # id of the padding token
    source_vocab: int
    intermediate: int
    encoder_intermediate: int
    activation: Activation
    embed_scale: float


def config(hf: CheckpointConfig) -> BartConfig:
    hidden, layers, heads = hf.int("d_model"), hf.int("decoder_layers"), hf.int("decoder_attention_heads")
    encoder_heads, positions = hf.int("encoder_attention_heads"), hf.int("max_position_embeddings")
    head_dim = head_columns(hidden, heads)
    head_columns(hidden, encoder_heads)  # raises where they do not divide the columns
    vocab = hf.int("vocab_size")
    return BartConfig(
        architecture=hf.architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocab=hf.int("decoder_vocab_size", vocab),
        max_position=2 * positions,
        max_length=2 * positions,
        windows=(0,) * layers,
        seq2seq=read_seq2seq(hf, positions, positions),
        encoder_layers=hf.int("encoder_layers"),
        encoder_heads=encoder_heads,
        family=FAMILIES[hf.architecture],
        positions=positions,
        padding=hf.int("pad_token_id", 1),
        source_vocab=vocab,
        intermediate=hf.int("decoder_ffn_dim"),
        encoder_intermediate=hf.int("encoder_ffn_dim"),
        activation=read_activation(hf, "activation_function", "gelu"),
        embed_scale=sqrt(hidden) if hf.bool("scale_embedding", False) else 1.0,
    )


def sinusoidal_positions(num_positions: int, columns: int) -> Float32:
    """[positions, columns] of "Attention Is All You Need": all sines, then all cosines."""
    angles = np.arange(num_positions)[:, None] / 10000 ** (2 * (np.arange(columns) // 2) / columns)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)


def tensor2tensor_positions(num_positions: int, columns: int) -> Float32:
    """The same, except that the last wavelength is exactly 10,000 times the first."""
    half = columns // 2
    angles = np.arange(num_positions)[:, None] / 10000 ** (np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class SinusoidalPositions:
    """A table of positions that is computed, whether or not the checkpoint has it."""

    num_positions: int
    columns: int
    tensor2tensor_offset: int | None  # row of position 0 in the table of tensor2tensor; None: that of the paper

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        rows = sinusoidal_positions(self.num_positions, self.columns)
        if (offset := self.tensor2tensor_offset) is not None:
            rows = tensor2tensor_positions(offset + self.num_positions, self.columns)[offset:]
        return ops.table(stored_floats("positions", rows))


@dataclass(frozen=True, slots=True)
class BartHead:
    """The head, whose bias is stored as `final_logits_bias` [1, vocab]."""

    name: str
    vocab: int
    columns: int
    bias: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.vocab, self.columns)
        if self.bias:
            yield "final_logits_bias", (1, self.vocab)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        weight, *biases = tensors
        return ops.pack([weight], [bias.squeezed() for bias in biases] or None, keep=Keep.EIGHT_BITS)


def top_specs(c: BartConfig, embed: str, source_embed: str, head: str) -> TensorSpecs:
    logits = BartHead(head, c.vocab, c.hidden, c.family.logits_bias)
    specs: dict[str, TensorSpec] = {"head": logits, "embed": EmbeddingTable(embed, c.vocab, c.hidden)}
    if source_embed != embed:
        specs["source_embed"] = EmbeddingTable(source_embed, c.source_vocab, c.hidden)
    return specs


def stack_specs(c: BartConfig) -> TensorSpecs:
    """The tensors of the encoder or the decoder outside its layers."""
    learned = EmbeddingTable("embed_positions", c.positions, c.hidden, skip_rows=SKIPPED)
    sinusoidal = SinusoidalPositions(c.positions, c.hidden, c.padding + 1 if c.family.tensor2tensor else None)
    specs: dict[str, TensorSpec] = {"positions": learned if c.family.learned_positions else sinusoidal}
    if c.family.embed_norm:
        specs["embed_norm"] = LayerNorm("layernorm_embedding", c.hidden)
    if c.family.pre_norm:
        specs["norm"] = LayerNorm("layer_norm", c.hidden)
    return specs


def cross_specs(c: BartConfig) -> TensorSpecs:
    return {
        "cross_q": Linear({"encoder_attn.q_proj": c.hidden}, c.hidden, bias=True),
        "cross_kv": Linear({f"encoder_attn.{x}_proj": c.hidden for x in "kv"}, c.hidden, bias=True),
        "cross_out": Linear({"encoder_attn.out_proj": c.hidden}, c.hidden, bias=True),
        "cross_norm": LayerNorm("encoder_attn_layer_norm", c.hidden),
    }


@dataclass(frozen=True, slots=True)
class BartDecoderLayer(BertLayer):
    cross_q: PackedWeight
    cross_kv: PackedWeight
    cross_out: PackedWeight
    cross_norm: Affine


@dataclass(frozen=True, slots=True)
class BartStack:
    """The encoder, or the decoder."""

    embed: Any
    positions: Any
    layers: list[Any]
    embed_norm: Affine | None = None
    norm: Affine | None = None


@dataclass(frozen=True, slots=True)
class BartWeights:
    encoder: BartStack
    decoder: BartStack
    head: PackedWeight


def load(ops: OpSet, checkpoint: Checkpoint, config: BartConfig, max_model_len: int) -> LoadedModel:
    stored = set(checkpoint.names())
    embed, source_embed = (_embedding_name(stored, side) for side in ("decoder", "encoder"))
    head = "lm_head" if "lm_head.weight" in stored else embed
    encoder_layer = layer_specs(LAYER, config.hidden, config.encoder_intermediate)
    decoder_layer = {**layer_specs(LAYER, config.hidden, config.intermediate), **cross_specs(config)}
    by_prefix = {
        "model.encoder.": stack_specs(config),
        "model.decoder.": stack_specs(config),
        **{f"model.encoder.layers.{i}.": encoder_layer for i in range(config.encoder_layers)},
        **{f"model.decoder.layers.{i}.": decoder_layer for i in range(config.layers)},
    }
    top, groups = load_weights(ops, checkpoint, top_specs(config, embed, source_embed, head), by_prefix, UNUSED)
    encoder, decoder, *layers = groups
    encoder_layers = [BertLayer(**layer) for layer in layers[: config.encoder_layers]]
    decoder_layers = [BartDecoderLayer(**layer) for layer in layers[config.encoder_layers :]]
    weights = BartWeights(
        BartStack(embed=top.get("source_embed", top["embed"]), **encoder, layers=encoder_layers),
        BartStack(embed=top["embed"], **decoder, layers=decoder_layers),
        top["head"],
    )
    return LoadedModel(
        config,
        partial(forward, config, weights),
        [top, *groups],
        encode=partial(encode, config, weights),
    )


def _embedding_name(stored: set[str], side: str) -> str:
    """Encoder and decoder have an embedding each, or share one."""
    own = f"model.{side}.embed_tokens"
    return own if f"{own}.weight" in stored else "model.shared"


def encode(c: BartConfig, w: BartWeights, ops: OpSet, batch: Any) -> Value:
    head_dim = c.hidden // c.encoder_heads
    x = embedded(c, w.encoder, ops, batch)
    for layer in w.encoder.layers:
        y = normed_input(c, layer.attn_norm, ops, x)
        q, k, v = ops.split(ops.linear(y, layer.qkv), (c.hidden,) * 3)
        attended = ops.attention(q, k, v, batch, head_dim, 1 / sqrt(head_dim))
        x = residual(c, layer.attn_norm, ops, x, ops.linear(attended, layer.out))
        x = feed_forward(c, layer, ops, x)
    if w.encoder.norm is not None:
        x = ops.layer_norm(x, *w.encoder.norm, EPS)
    return write_source(c, [layer.cross_kv for layer in w.decoder.layers], ops, x, batch)


def forward(c: BartConfig, w: BartWeights, ops: OpSet, batch: Any) -> Value:
    scale = 1 / sqrt(c.head_dim)
    x = embedded(c, w.decoder, ops, batch)
    for index, layer in enumerate(w.decoder.layers):
        y = normed_input(c, layer.attn_norm, ops, x)
        q, k, v = ops.split(ops.linear(y, layer.qkv), (c.hidden,) * 3)
        ops.write_kv(k, v, batch, index)
        attended = ops.paged_attention(q, batch, index, c.head_dim, scale)
        x = residual(c, layer.attn_norm, ops, x, ops.linear(attended, layer.out))
        q = ops.linear(normed_input(c, layer.cross_norm, ops, x), layer.cross_q)
        attended = ops.cross_attention(q, batch, index, c.head_dim, scale)
        x = residual(c, layer.cross_norm, ops, x, ops.linear(attended, layer.cross_out))
        x = feed_forward(c, layer, ops, x)
    if w.decoder.norm is not None:
        x = ops.layer_norm(x, *w.decoder.norm, EPS)
    return ops.logits(x, w.head, batch)


def embedded(c: BartConfig, stack: BartStack, ops: OpSet, batch: Any) -> Value:
    x = ops.embedding(batch.ids, stack.embed)
    if c.embed_scale != 1:
        x = ops.scale(x, c.embed_scale)
    x = ops.add(x, ops.embedding(batch.positions, stack.positions))
    return x if stack.embed_norm is None else ops.layer_norm(x, *stack.embed_norm, EPS)


def feed_forward(c: BartConfig, layer: BertLayer, ops: OpSet, x: Value) -> Value:
    inner = ops.activate(ops.linear(normed_input(c, layer.mlp_norm, ops, x), layer.up), c.activation)
    return residual(c, layer.mlp_norm, ops, x, ops.linear(inner, layer.down))


def normed_input(c: BartConfig, norm: Affine, ops: OpSet, x: Value) -> Value:
    """The input of attention or feed-forward."""
    return ops.layer_norm(x, *norm, EPS) if c.family.pre_norm else x


def residual(c: BartConfig, norm: Affine, ops: OpSet, x: Value, output: Value) -> Value:
    """x plus the output of attention or feed-forward."""
    x = ops.add(x, output)
    return x if c.family.pre_norm else ops.layer_norm(x, *norm, EPS)

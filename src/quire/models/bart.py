"""BART, and the encoder-decoders that differ from it in where norms stand and how positions are known: mBART, Marian,
Pegasus, M2M100 and NLLB."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models.activations import read_activation
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
# The table of words that nobody reads where each side has its own, and waves.
UNUSED = r"model\.shared\.weight|model\.(encoder|decoder)\.embed_(tokens|positions)\.weights?"


@dataclass(frozen=True, slots=True)
class BartFamily:
    """How a family differs from BART."""

    norms_before: bool = False  # of attention and feed-forward, and another behind the last layer; else of the sums
    embed_norm: bool = True
    learned: bool = True  # positions; else they are waves
    to_the_last: bool = (
        False  # which waves: see `tensor2tensor_positions`. They begin behind the row of the padding token
    )
    final_bias: bool = True  # of logits


FAMILIES = {
    "BartForConditionalGeneration": BartFamily(),
    "MBartForConditionalGeneration": BartFamily(norms_before=True),
    "MarianMTModel": BartFamily(embed_norm=False, learned=False),
    "M2M100ForConditionalGeneration": BartFamily(
        norms_before=True, embed_norm=False, learned=False, to_the_last=True, final_bias=False
    ),
    "PegasusForConditionalGeneration": BartFamily(norms_before=True, embed_norm=False, learned=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(Seq2SeqConfig):
    family: BartFamily
    positions: int
    padding: int  # the token that stands for none
    source_vocab: int
    intermediate: int
    encoder_intermediate: int
    activation: Activation
    embed_scale: float


def config(hf: CheckpointConfig) -> BartConfig:
    hidden, layers, heads = hf.int("d_model"), hf.int("decoder_layers"), hf.int("decoder_attention_heads")
    encoder_heads, positions = hf.int("encoder_attention_heads"), hf.int("max_position_embeddings")
    for number in (heads, encoder_heads):
        if number < 1 or hidden % number:
            raise BadCheckpoint(f"{hidden} columns cannot be divided among {number} heads")
    vocab = hf.int("vocab_size")
    return BartConfig(
        architecture=hf.architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
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
    """[positions, columns]: sines of ever longer waves, and then their cosines."""
    angles = np.arange(num_positions)[:, None] / 10000 ** (2 * (np.arange(columns) // 2) / columns)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)


def tensor2tensor_positions(num_positions: int, columns: int) -> Float32:
    """The same, where the last wave is 10,000 times as long as the first, and not less."""
    half = columns // 2
    angles = np.arange(num_positions)[:, None] / 10000 ** (np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class SinusoidalPositions:
    """A table of positions that is not stored; if it is all the same, it is not read."""

    num_positions: int
    columns: int
    skipped: int | None  # rows before position 0 of waves to the last; None: waves of the other kind

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        rows = sinusoidal_positions(self.num_positions, self.columns)
        if self.skipped is not None:
            rows = tensor2tensor_positions(self.skipped + self.num_positions, self.columns)[self.skipped :]
        return ops.table(stored_floats("positions", rows))


@dataclass(frozen=True, slots=True)
class BartHead:
    """What is added to logits is stored as [1, vocab], under a name of its own."""

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


def top_specs(c: BartConfig, words: str, source_words: str, head: str) -> TensorSpecs:
    logits = BartHead(head, c.vocab, c.hidden, c.family.final_bias)
    names: dict[str, TensorSpec] = {"head": logits, "words": EmbeddingTable(words, c.vocab, c.hidden)}
    if source_words != words:
        names["source_words"] = EmbeddingTable(source_words, c.source_vocab, c.hidden)
    return names


def stack_specs(c: BartConfig) -> TensorSpecs:
    """Of the encoder or the decoder, beside its layers."""
    learned = EmbeddingTable("embed_positions", c.positions, c.hidden, skip_rows=SKIPPED)
    waved = SinusoidalPositions(c.positions, c.hidden, c.padding + 1 if c.family.to_the_last else None)
    names: dict[str, TensorSpec] = {"positions": learned if c.family.learned else waved}
    if c.family.embed_norm:
        names["embed_norm"] = LayerNorm("layernorm_embedding", c.hidden)
    if c.family.norms_before:
        names["norm"] = LayerNorm("layer_norm", c.hidden)
    return names


def layer_specs(c: BartConfig, intermediate: int) -> TensorSpecs:
    return {
        "qkv": Linear({f"self_attn.{x}_proj": c.hidden for x in "qkv"}, c.hidden, bias=True),
        "out": Linear({"self_attn.out_proj": c.hidden}, c.hidden, bias=True),
        "attn_norm": LayerNorm("self_attn_layer_norm", c.hidden),
        "up": Linear({"fc1": intermediate}, c.hidden, bias=True),
        "down": Linear({"fc2": c.hidden}, intermediate, bias=True),
        "mlp_norm": LayerNorm("final_layer_norm", c.hidden),
    }


def cross_specs(c: BartConfig) -> TensorSpecs:
    return {
        "cross_q": Linear({"encoder_attn.q_proj": c.hidden}, c.hidden, bias=True),
        "cross_kv": Linear({f"encoder_attn.{x}_proj": c.hidden for x in "kv"}, c.hidden, bias=True),
        "cross_out": Linear({"encoder_attn.out_proj": c.hidden}, c.hidden, bias=True),
        "cross_norm": LayerNorm("encoder_attn_layer_norm", c.hidden),
    }


@dataclass(frozen=True, slots=True)
class BartLayer:
    qkv: PackedWeight
    out: PackedWeight
    attn_norm: Affine
    up: PackedWeight
    down: PackedWeight
    mlp_norm: Affine


@dataclass(frozen=True, slots=True)
class BartDecoderLayer(BartLayer):
    cross_q: PackedWeight
    cross_kv: PackedWeight
    cross_out: PackedWeight
    cross_norm: Affine


@dataclass(frozen=True, slots=True)
class BartStack:
    """The encoder, or the decoder."""

    words: Any
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
    words, source_words = (_words(stored, side) for side in ("decoder", "encoder"))
    head = "lm_head" if "lm_head.weight" in stored else words
    reader, writer = layer_specs(config, config.encoder_intermediate), layer_specs(config, config.intermediate)
    named = {
        "model.encoder.": stack_specs(config),
        "model.decoder.": stack_specs(config),
        **{f"model.encoder.layers.{i}.": reader for i in range(config.encoder_layers)},
        **{f"model.decoder.layers.{i}.": {**writer, **cross_specs(config)} for i in range(config.layers)},
    }
    top, groups = load_weights(ops, checkpoint, top_specs(config, words, source_words, head), named, UNUSED)
    encoder, decoder, *layers = groups
    readers = [BartLayer(**layer) for layer in layers[: config.encoder_layers]]
    writers = [BartDecoderLayer(**layer) for layer in layers[config.encoder_layers :]]
    weights = BartWeights(
        BartStack(words=top.get("source_words", top["words"]), **encoder, layers=readers),
        BartStack(words=top["words"], **decoder, layers=writers),
        top["head"],
    )
    return LoadedModel(
        config,
        partial(forward, config, weights),
        [top, *groups],
        encode=partial(encode, config, weights),
    )


def _words(stored: set[str], side: str) -> str:
    """Where the table of words is: one each, or one for both sides."""
    own = f"model.{side}.embed_tokens"
    return own if f"{own}.weight" in stored else "model.shared"


def encode(c: BartConfig, w: BartWeights, ops: OpSet, batch: Any) -> Value:
    head_dim = c.hidden // c.encoder_heads
    x = embed(c, w.encoder, ops, batch)
    for layer in w.encoder.layers:
        y = before(c, layer.attn_norm, ops, x)
        q, k, v = ops.split(ops.linear(y, layer.qkv), (c.hidden,) * 3)
        found = ops.attention(q, k, v, batch, head_dim, 1 / sqrt(head_dim))
        x = after(c, layer.attn_norm, ops, x, ops.linear(found, layer.out))
        x = feed_forward(c, layer, ops, x)
    if w.encoder.norm is not None:
        x = ops.layer_norm(x, *w.encoder.norm, EPS)
    return write_source(c, [layer.cross_kv for layer in w.decoder.layers], ops, x, batch)


def forward(c: BartConfig, w: BartWeights, ops: OpSet, batch: Any) -> Value:
    scale = 1 / sqrt(c.head_dim)
    x = embed(c, w.decoder, ops, batch)
    for index, layer in enumerate(w.decoder.layers):
        y = before(c, layer.attn_norm, ops, x)
        q, k, v = ops.split(ops.linear(y, layer.qkv), (c.hidden,) * 3)
        ops.write_kv(k, v, batch, index)
        found = ops.paged_attention(q, batch, index, c.head_dim, scale)
        x = after(c, layer.attn_norm, ops, x, ops.linear(found, layer.out))
        q = ops.linear(before(c, layer.cross_norm, ops, x), layer.cross_q)
        found = ops.cross_attention(q, batch, index, c.head_dim, scale)
        x = after(c, layer.cross_norm, ops, x, ops.linear(found, layer.cross_out))
        x = feed_forward(c, layer, ops, x)
    if w.decoder.norm is not None:
        x = ops.layer_norm(x, *w.decoder.norm, EPS)
    return ops.logits(x, w.head, batch)


def embed(c: BartConfig, side: BartStack, ops: OpSet, batch: Any) -> Value:
    x = ops.embedding(batch.ids, side.words)
    if c.embed_scale != 1:
        x = ops.scale(x, c.embed_scale)
    x = ops.add(x, ops.embedding(batch.positions, side.positions))
    return x if side.embed_norm is None else ops.layer_norm(x, *side.embed_norm, EPS)


def feed_forward(c: BartConfig, layer: BartLayer, ops: OpSet, x: Value) -> Value:
    inner = ops.activate(ops.linear(before(c, layer.mlp_norm, ops, x), layer.up), c.activation)
    return after(c, layer.mlp_norm, ops, x, ops.linear(inner, layer.down))


def before(c: BartConfig, norm: Affine, ops: OpSet, x: Value) -> Value:
    """What a part of a layer reads."""
    return ops.layer_norm(x, *norm, EPS) if c.family.norms_before else x


def after(c: BartConfig, norm: Affine, ops: OpSet, x: Value, found: Value) -> Value:
    """And what it leaves."""
    x = ops.add(x, found)
    return x if c.family.norms_before else ops.layer_norm(x, *norm, EPS)

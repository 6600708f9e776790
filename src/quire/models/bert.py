"""BERT, and the encoders that differ from it in a few features: RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet,
data2vec, ERNIE, ELECTRA and ALBERT, whose layers share their weights.

Norms stand after each residual sum, and every token attends to all others of its text. Positions and token types, which
tell the two texts of a pair apart, are learned embeddings: one table holds the sums of both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.bert_layers import (
    ACTIVATIONS,
    BERT_LAYER,
    BertLayer,
    after_attention,
    classifier_specs,
    encoder_fields,
    layer_specs,
    rows_or_labels,
)
from quire.models.config import EncoderConfig
from quire.models.loading import Affine, EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs, load_weights
from quire.models.t5 import RelativePositionBias
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import MAX_SIZES, CheckpointConfig

# Buffers of older exports, and heads that are not used.
UNUSED = (
    r".*\.position_ids|.*\.token_type_ids|position_ids|(.*\.)?pooler\..*|cls\..*|lm_head\..*|vocab_\w+\..*"
    r"|(discriminator_|generator_)?predictions\..*|generator_lm_head\..*|sop_classifier\..*"
)

DISTIL_LAYER = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "out": "attention.out_lin",
    "attn_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}
MPNET_LAYER = BERT_LAYER | {
    "q": "attention.attn.q",
    "k": "attention.attn.k",
    "v": "attention.attn.v",
    "out": "attention.attn.o",
    "attn_norm": "attention.LayerNorm",
}
ALBERT_LAYER = {
    "q": "attention.query",
    "k": "attention.key",
    "v": "attention.value",
    "out": "attention.dense",
    "attn_norm": "attention.LayerNorm",
    "up": "ffn",
    "down": "ffn_output",
    "mlp_norm": "full_layer_layer_norm",
}
BERT_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "activation": "hidden_act",
}
DISTIL_KEYS = {
    "hidden": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "intermediate": "hidden_dim",
    "activation": "activation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BertFamily:
    """What a family does otherwise than BERT, whose row is all defaults."""

    keys: Mapping[str, str] = field(default_factory=lambda: BERT_KEYS)  # of config.json
    eps: float | None = None  # of the norms; None: `layer_norm_eps`
    token_types: bool = True  # the texts of a pair are told apart by an embedding
    task_key: str | None = None  # the key that says whether every token has the embedding of a task: the first
    positions_after_padding: bool = False  # position 0 is the row behind that of the padding token
    first_position: int = 0  # the row of position 0 otherwise
    relative_bias: bool = False  # scores have relative position biases, as T5's
    projection: str = ""  # from the width of the embedding, `embedding_size`, to that of the layers
    always_projected: bool = False  # also where both widths are equal
    shared_layers: bool = False  # layers are in groups, and those of a group share their weights
    body: str = "bert."  # tensor names begin with it where the checkpoint has a head
    layers: str = "encoder.layer."
    layer: Mapping[str, str] = field(default_factory=lambda: BERT_LAYER)  # our name -> tensor
    pooler: str = "bert.pooler.dense"  # of a classifier, which is pooler, activation, classifier
    pooler_activation: Activation = Activation.TANH
    classifier: str = "classifier"


ROBERTA = BertFamily(
    positions_after_padding=True, body="roberta.", pooler="classifier.dense", classifier="classifier.out_proj"
)
FAMILIES = {  # by the architecture up to `Model` or `For...`
    "Bert": BertFamily(),
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "Camembert": ROBERTA,
    "Data2VecText": replace(ROBERTA, body="data2vec_text."),
    "Ernie": BertFamily(body="ernie.", pooler="ernie.pooler.dense", task_key="use_task_id"),
    "DistilBert": BertFamily(
        keys=DISTIL_KEYS,
        eps=1e-12,
        token_types=False,
        body="distilbert.",
        layers="transformer.layer.",
        layer=DISTIL_LAYER,
        pooler="pre_classifier",
        pooler_activation=Activation.RELU,
    ),
    "Electra": replace(
        ROBERTA,
        positions_after_padding=False,
        projection="embeddings_project",
        body="electra.",
        pooler_activation=Activation.GELU,
    ),
    "Albert": BertFamily(
        projection="encoder.embedding_hidden_mapping_in",
        always_projected=True,
        shared_layers=True,
        body="albert.",
        layer=ALBERT_LAYER,
        pooler="albert.pooler",
    ),
    "MPNet": replace(
        ROBERTA,
        token_types=False,
        positions_after_padding=False,
        first_position=2,
        relative_bias=True,
        body="mpnet.",
        layer=MPNET_LAYER,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    family: BertFamily
    embed_width: int
    layer_names: tuple[str, ...]  # what stands before the tensors of each layer
    intermediate: int
    eps: float  # of the norms
    activation: Activation
    skipped: int  # rows before position 0 in the table of positions
    token_types: bool  # the texts of a pair are told apart
    tasks: int  # rows of the table of tasks; 0: there is none


def config(hf: CheckpointConfig) -> BertConfig:
    family = FAMILIES[hf.architecture.removesuffix("Model").partition("For")[0]]
    hf.expect("position_embedding_type", "absolute", None)
    hf.expect("relative_attention_num_buckets", 32, None)
    hf.expect("is_decoder", False, None)
    key = family.keys
    hidden, layers, heads = hf.int(key["hidden"]), hf.int(key["layers"]), hf.int(key["heads"])
    skipped = hf.int("pad_token_id", 1) + 1 if family.positions_after_padding else family.first_position
    max_position = hf.int("max_position_embeddings") - skipped
    segments = hf.int("type_vocab_size", 2) if family.token_types else 0
    names = (
        _shared_layers(hf, max(layers, 1)) if family.shared_layers else [f"{family.layers}{i}." for i in range(layers)]
    )
    return BertConfig(
        **encoder_fields(hf, hidden, len(names), heads, max_position),
        segments=max(segments, 1),
        family=family,
        embed_width=hf.int("embedding_size", hidden) if family.projection else hidden,
        layer_names=tuple(names),
        intermediate=hf.int(key["intermediate"]),
        eps=hf.float("layer_norm_eps", 1e-12) if family.eps is None else family.eps,
        activation=ACTIVATIONS[hf.expect(key["activation"], *ACTIVATIONS)],
        skipped=skipped,
        token_types=segments > 0,
        tasks=_tasks(hf, family),
    )


def _tasks(hf: CheckpointConfig, family: BertFamily) -> int:
    return hf.int("task_type_vocab_size", 3) if family.task_key and hf.bool(family.task_key, False) else 0


def _shared_layers(hf: CheckpointConfig, layers: int) -> list[str]:
    """The layers of ALBERT: each is those of its group, one after the other."""
    groups, inner = hf.int("num_hidden_groups", 1), hf.int("inner_group_num", 1)
    if not 1 <= groups <= layers or not 1 <= inner <= MAX_SIZES["num_hidden_layers"] // layers:
        raise BadCheckpoint(f"{layers} layers are in {groups} groups of {inner}")
    return [
        f"encoder.albert_layer_groups.{layer * groups // layers}.albert_layers.{part}."
        for layer in range(layers)
        for part in range(inner)
    ]


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A row for every position of every token type: the sum of the two embeddings, and of that of the first task."""

    config: BertConfig
    prefix: str

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self.config
        yield f"{self.prefix}position_embeddings.weight", (c.skipped + c.max_position, c.embed_width)
        if c.token_types:
            yield f"{self.prefix}token_type_embeddings.weight", (c.segments, c.embed_width)
        if c.tasks:
            yield f"{self.prefix}task_type_embeddings.weight", (c.tasks, c.embed_width)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        c = self.config
        positions, *others = (dequantize(tensor).reshape(-1, c.embed_width) for tensor in tensors)
        positions = positions[c.skipped :] + others.pop()[0] if c.tasks else positions[c.skipped :]
        if c.token_types:
            types = others[0].reshape(-1, 1, c.embed_width)
            positions = (types + positions).reshape(-1, c.embed_width)  # [types * positions, columns]
        return ops.table(stored_floats(tensors[0].name, positions))


def top_specs(c: BertConfig, prefix: str) -> TensorSpecs:
    embeddings = f"{prefix}embeddings."
    biases = RelativePositionBias(f"{prefix}encoder.relative_attention_bias", c.heads, 32, 128, both_ways=True)
    projection = Linear({f"{prefix}{c.family.projection}": c.hidden}, c.embed_width, bias=True)
    is_projected = c.family.always_projected or c.embed_width != c.hidden
    return {
        "embed": EmbeddingTable(f"{embeddings}word_embeddings", c.vocab, c.embed_width),
        "positions": PositionTable(c, embeddings),
        "norm": LayerNorm(f"{embeddings}LayerNorm", c.embed_width),
        **({"projection": projection} if is_projected else {}),
        **({"biases": biases} if c.family.relative_bias else {}),
        **classifier_specs(c.family.pooler, c.family.classifier, c.hidden, c.labels),
    }


@dataclass(frozen=True, slots=True)
class BertWeights:
    embed: Any
    positions: Any
    norm: Affine
    layers: list[BertLayer]
    projection: PackedWeight | None = None
    biases: Any = None  # of scores, by relative position
    pooler: PackedWeight | None = None
    head: PackedWeight | None = None


def load(ops: OpSet, checkpoint: Checkpoint, config: BertConfig, max_model_len: int) -> LoadedModel:
    body = config.family.body
    prefix = body if any(name.startswith(body) for name in checkpoint.names()) else ""
    by_prefix = {
        f"{prefix}{name}": layer_specs(config.family.layer, config.hidden, config.intermediate)
        for name in dict.fromkeys(config.layer_names)
    }
    top, layers = load_weights(ops, checkpoint, top_specs(config, prefix), by_prefix, UNUSED)
    named = {name: BertLayer(**layer) for name, layer in zip(by_prefix, layers, strict=True)}
    weights = BertWeights(**top, layers=[named[f"{prefix}{name}"] for name in config.layer_names])
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def forward(c: BertConfig, w: BertWeights, ops: OpSet, batch: Any) -> Value:
    """-> the hidden states, or a classifier's logits, of rows batch.logit_rows."""
    x = ops.add(ops.embedding(batch.ids, w.embed), ops.embedding(batch.positions, w.positions))
    x = ops.layer_norm(x, *w.norm, c.eps)
    x = x if w.projection is None else ops.linear(x, w.projection)
    for layer in w.layers:
        q, k, v = ops.split(ops.linear(x, layer.qkv), (c.hidden, c.hidden, c.hidden))
        attended = ops.attention(q, k, v, batch, c.head_dim, 1 / sqrt(c.head_dim), biases=w.biases)
        x = after_attention(layer, ops, x, attended, c.activation, c.eps)
    return rows_or_labels(w.pooler, w.head, c.family.pooler_activation, ops, x, batch)

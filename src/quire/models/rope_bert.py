"""BERT with rope, or ALiBi, in place of learned positions: NomicBERT, GTE, Jina's embedding models.

Norms stand after each residual sum. Most feed-forward layers have a gate. Of nomic-embed-text-v2, every other layer has
experts, without a gate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from quire.models.alibi import alibi_slopes
from quire.models.bert_layers import ACTIVATIONS, classifier_specs, encoder_fields, head_columns, rows_or_labels
from quire.models.config import EncoderConfig
from quire.models.expert_rows import ExpertRows, UngatedExperts
from quire.models.loading import (
    Affine,
    EmbeddingTable,
    ExpertLinear,
    LayerNorm,
    Linear,
    LinearPart,
    LoadedModel,
    TensorSpec,
    TensorSpecs,
    load_weights,
)
from quire.models.rope import RopeSpec, frequencies, read_rope
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

UNUSED = r"(.*\.)?pooler\..*|cls\..*|lm_head\..*|.*\.rotary_emb\.inv_freq"  # heads that are not used, buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeBertFamily:
    """The features and tensors of a family, whose defaults are NomicBERT's."""

    adapt: Callable[[CheckpointConfig], CheckpointConfig]  # to BERT's keys; what is not supported fails here, by name
    activation: Activation | None = None  # None: `hidden_act`
    max_position: int = 2048  # where config.json does not say
    theta: float = 1000.0  # of rope, the same; 0: ALiBi
    bodies: tuple[str, ...] = ("bert.",)  # tensor names begin with one of them where the checkpoint has a head
    embed_norm: str = "emb_ln"
    layers: str = "encoder.layers."
    qkv: tuple[str, ...] = ("attn.Wqkv",)  # one tensor, or three
    out: str = "attn.out_proj"
    attn_norm: str = "norm1"
    up: tuple[str, ...] = ("mlp.fc12", "mlp.fc11")  # gate and up, or one tensor
    split_up: tuple[str, ...] = ()  # the two of GGUF files, where the published model has one
    gated: bool = True
    gate_last: bool = False  # in the tensor of both, the gate stands behind up
    down: str = "mlp.fc2"
    mlp_norm: str = "norm2"
    biases: Mapping[str, bool] = field(default_factory=dict)  # of qkv, out, up and down: whether there are any
    pooler: str = "pooler.dense"  # of a classifier, which is pooler, tanh, classifier
    classifier: str = "classifier"


SPELLINGS = {  # NomicBERT's authors' key -> that of transformers
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}

NOMIC_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")


def nomic(hf: CheckpointConfig) -> CheckpointConfig:
    hf.expect("activation_function", "swiglu", None)
    hf.expect("hidden_act", "silu", None)
    for key in NOMIC_BIASES:
        hf.expect(key, False, None)
    return _nomic_keys(hf)


def nomic_moe(hf: CheckpointConfig) -> CheckpointConfig:
    hf.expect("activation_function", "gelu")
    for key in NOMIC_BIASES:
        hf.expect(key, True)
    hf.expect("moe_normalize_expert_weights", False, None)
    hf.expect("expert_choice_router", False, None)
    hf.expect("num_shared_experts", 0, None)
    return _nomic_keys(hf)


def _nomic_keys(hf: CheckpointConfig) -> CheckpointConfig:
    for key in ("prenorm", "parallel_block", "use_rms_norm", "causal"):
        hf.expect(key, False, None)
    hf.expect("rotary_emb_fraction", 1.0, None)
    hf.expect("rotary_emb_interleaved", False, None)
    return hf.with_values({key: hf.get(authors) for authors, key in SPELLINGS.items() if authors in hf})


def gte(hf: CheckpointConfig) -> CheckpointConfig:
    """`ntk` scales theta by its factor, and all frequencies so that the slowest is divided by it."""
    hf.expect("position_embedding_type", "rope", None)
    hf.expect("layer_norm_type", "layer_norm", None)
    hf.expect("logn_attention_scale", False, None)
    scaling = hf.section("rope_scaling")
    if scaling.get("type") != "ntk":
        return hf
    scaling.expect("mixed_b", None)
    factor, head_dim = scaling.float("factor"), hf.int("hidden_size") // max(hf.int("num_attention_heads"), 1)
    linear = {"rope_type": "linear", "factor": factor ** (2 / max(head_dim, 1))}
    return hf.with_values({"rope_theta": factor * hf.float("rope_theta", 10_000.0), "rope_scaling": linear})


def jina_2(hf: CheckpointConfig) -> CheckpointConfig:
    hf.expect("position_embedding_type", "alibi")
    hf.expect("feed_forward_type", "geglu")
    return hf


ALL_BIASES = {"qkv": True, "out": True, "up": True, "down": True}
NOMIC_MOE = RopeBertFamily(adapt=nomic_moe, activation=Activation.GELU, up=("mlp.fc1",), gated=False, biases=ALL_BIASES)
GTE = RopeBertFamily(
    adapt=gte,
    max_position=8192,
    theta=160_000.0,
    bodies=("gte.", "new."),
    embed_norm="embeddings.LayerNorm",
    layers="encoder.layer.",
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attn_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    gate_last=True,
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    biases=ALL_BIASES | {"up": False},
)
FAMILIES = {  # by the architecture up to `Model` or `For...`
    "NomicBert": RopeBertFamily(adapt=nomic, activation=Activation.SILU),
    "Gte": GTE,
    "New": GTE,  # as its authors spell it
    "JinaEmbeddingsV3": RopeBertFamily(
        adapt=lambda hf: hf,
        max_position=8194,
        theta=20_000.0,
        bodies=("roberta.",),
        qkv=("mixer.Wqkv",),
        out="mixer.out_proj",
        up=("mlp.fc1",),
        gated=False,
        biases=ALL_BIASES,
        pooler="classifier.dense",
        classifier="classifier.out_proj",
    ),
    "JinaBert": RopeBertFamily(  # v2
        adapt=jina_2,
        activation=Activation.GELU,
        theta=0.0,
        max_position=8192,
        embed_norm="embeddings.LayerNorm",
        layers="encoder.layer.",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        attn_norm="attention.output.LayerNorm",
        up=("mlp.gated_layers",),
        split_up=("mlp.gated_layers_w", "mlp.gated_layers_v"),
        down="mlp.wo",
        mlp_norm="mlp.layernorm",
        biases=ALL_BIASES | {"up": False},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeBertConfig(EncoderConfig):
    family: RopeBertFamily
    intermediate: int
    token_types: int  # every token is of the first; 0: there are none
    eps: float  # of the norms
    activation: Activation
    rope: RopeSpec | None  # None: ALiBi
    num_experts: int = 0
    routing: Routing | None = None
    sparse: tuple[bool, ...]  # for each layer: whether it has experts


def config(hf: CheckpointConfig) -> RopeBertConfig:
    family = FAMILIES[hf.architecture.removesuffix("Model").partition("For")[0]]
    interval = hf.int("moe_every_n_layers", 0)
    hf = (family := NOMIC_MOE if interval else family).adapt(hf)
    hidden, layers, heads = hf.int("hidden_size"), hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    head_dim = head_columns(hidden, heads)
    max_position, token_types = hf.int("max_position_embeddings", family.max_position), hf.int("type_vocab_size", 2)
    return RopeBertConfig(
        **encoder_fields(hf, hidden, layers, heads, max_position),
        family=family,
        intermediate=hf.int("intermediate_size"),
        token_types=token_types,
        eps=hf.float("layer_norm_eps", 1e-12),
        activation=family.activation or ACTIVATIONS[hf.expect("hidden_act", *ACTIVATIONS)],
        rope=read_rope(hf, head_dim, max_position, family.theta) if family.theta else None,
        sparse=tuple(interval > 0 and layer % interval == 1 for layer in range(layers)),
        **(_experts(hf) if interval else {}),
    )


def _experts(hf: CheckpointConfig) -> dict[str, Any]:
    routing, num_experts = Routing(hf.int("moe_top_k", 1)), hf.int("num_experts")
    routing.check(num_experts)
    return {"num_experts": num_experts, "routing": routing}


@dataclass(frozen=True, slots=True)
class SameRow:
    """The first row of a tensor, at every position. (Rope reads positions: they cannot tell token types, too.)"""

    name: str
    shape: tuple[int, ...]
    num_positions: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        first = dequantize(tensors[0]).reshape(-1, self.shape[-1])[0]
        return ops.table(stored_floats(self.name, np.tile(first, (self.num_positions, 1))))


def top_specs(c: RopeBertConfig, prefix: str) -> TensorSpecs:
    f = c.family
    pooler = f.pooler if f.pooler.startswith("classifier") else f"{prefix}{f.pooler}"
    specs: dict[str, TensorSpec] = {
        "embed": EmbeddingTable(f"{prefix}embeddings.word_embeddings", c.vocab, c.hidden),
        "norm": LayerNorm(f"{prefix}{f.embed_norm}", c.hidden),
    }
    if c.token_types:
        name = f"{prefix}embeddings.token_type_embeddings.weight"
        specs["token_type"] = SameRow(name, (c.token_types, c.hidden), c.max_position)
    return {**specs, **classifier_specs(pooler, f.classifier, c.hidden, c.labels)}


def layer_specs(c: RopeBertConfig, sparse: bool, split: bool) -> TensorSpecs:
    f, size = c.family, c.intermediate
    up = (split and f.split_up) or f.up
    outputs = size * (2 if f.gated else 1) // len(up)
    order = np.roll(np.arange(2 * size, dtype=np.int32), size) if f.gate_last else None
    dense: TensorSpecs = {
        "up": Linear(dict.fromkeys(up, LinearPart(outputs, order)), c.hidden, f.biases.get("up", False)),
        "down": Linear({f.down: c.hidden}, size, f.biases.get("down", False)),
    }
    return {
        "qkv": Linear(dict.fromkeys(f.qkv, 3 * c.hidden // len(f.qkv)), c.hidden, f.biases.get("qkv", False)),
        "out": Linear({f.out: c.hidden}, c.hidden, f.biases.get("out", False)),
        "attn_norm": LayerNorm(f.attn_norm, c.hidden),
        "mlp_norm": LayerNorm(f.mlp_norm, c.hidden),
        **(_expert_specs(c, split) if sparse else dense),
    }


def _expert_specs(c: RopeBertConfig, split: bool) -> TensorSpecs:
    """`split`: every expert has matrices of its own, in GGUF files, which leave out the bias of all."""
    sizes = (c.num_experts, c.intermediate, c.hidden)
    router = Linear({"mlp.router.layer": c.num_experts}, c.hidden, keep=Keep.ALL)
    if split:
        down = ExpertLinear({"mlp.experts.{}.w2": c.hidden}, c.intermediate, c.num_experts)
        return {"router": router, "experts_up": UngatedExperts("mlp.experts.{}.w1", *sizes), "experts_down": down}
    return {
        "router": router,
        "experts_up": UngatedExperts("mlp.experts.mlp.w1", *sizes),
        "experts_down": ExpertRows(("mlp.experts.mlp.w2",), *sizes, transposed=True),
        "experts_bias": SameRow("mlp.experts.bias", (c.hidden,), c.max_position),
    }


@dataclass(frozen=True, slots=True)
class RopeBertLayer:
    qkv: PackedWeight
    out: PackedWeight
    attn_norm: Affine
    mlp_norm: Affine
    up: PackedWeight | None = None  # with the gate stacked before it, if there is one
    down: PackedWeight | None = None
    router: PackedWeight | None = None  # of a layer with experts
    experts_up: PackedExperts | None = None
    experts_down: PackedExperts | None = None
    experts_bias: Any = None


@dataclass(frozen=True, slots=True)
class RopeBertWeights:
    embed: Any
    norm: Affine
    layers: list[RopeBertLayer]
    token_type: Any = None
    rope: Any = None  # rotary frequencies
    slopes: Any = None  # ALiBi, as biases by relative position
    pooler: PackedWeight | None = None
    head: PackedWeight | None = None


def load(ops: OpSet, checkpoint: Checkpoint, config: RopeBertConfig, max_model_len: int) -> LoadedModel:
    stored = checkpoint.names()
    prefix = next((body for body in config.family.bodies if any(name.startswith(body) for name in stored)), "")
    names = [f"{prefix}{config.family.layers}{layer}." for layer in range(config.layers)]
    split_names = (*config.family.split_up, "mlp.experts.0.w1")
    split = any(f"{layer}{name}.weight" in stored for layer in names[:2] for name in split_names)
    by_prefix = {name: layer_specs(config, sparse, split) for name, sparse in zip(names, config.sparse, strict=True)}
    top, layers = load_weights(ops, checkpoint, top_specs(config, prefix), by_prefix, UNUSED)
    weights = RopeBertWeights(
        **top,
        layers=[RopeBertLayer(**layer) for layer in layers],
        rope=ops.frequencies(*frequencies(config.rope, max_model_len)) if config.rope else None,
        slopes=None if config.rope else ops.biases(alibi_biases(config.heads, max_model_len)),
    )
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def alibi_biases(heads: int, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[heads, 2 * length + 1]: scores fall with the distance, on both sides."""
    distance = np.abs(np.arange(-length, length + 1))
    return (-np.array(alibi_slopes(heads))[:, None] * distance).astype(np.float32)


def forward(c: RopeBertConfig, w: RopeBertWeights, ops: OpSet, batch: Any) -> Value:
    """-> the hidden states, or a classifier's logits, of rows batch.logit_rows."""
    x = ops.embedding(batch.ids, w.embed)
    if w.token_type is not None:
        x = ops.add(x, ops.embedding(batch.positions, w.token_type))
    x = ops.layer_norm(x, *w.norm, c.eps)
    angles = ops.rope_angles(batch.positions, w.rope) if c.rope else None
    for layer in w.layers:
        q, k, v = ops.split(ops.linear(x, layer.qkv), (c.hidden, c.hidden, c.hidden))
        if angles is not None:
            q, k = ops.rope(q, angles, c.head_dim), ops.rope(k, angles, c.head_dim)
        attended = ops.attention(q, k, v, batch, c.head_dim, 1 / sqrt(c.head_dim), biases=w.slopes)
        x = ops.layer_norm(ops.add(x, ops.linear(attended, layer.out)), *layer.attn_norm, c.eps)
        x = ops.layer_norm(ops.add(x, feed_forward(c, layer, ops, x, batch)), *layer.mlp_norm, c.eps)
    return rows_or_labels(w.pooler, w.head, Activation.TANH, ops, x, batch)


def feed_forward(c: RopeBertConfig, layer: RopeBertLayer, ops: OpSet, x: Value, batch: Any) -> Value:
    if layer.up is not None and layer.down is not None:
        act = ops.activate_and_mul if c.family.gated else ops.activate
        return ops.linear(act(ops.linear(x, layer.up), c.activation), layer.down)
    assert layer.router and layer.experts_up and layer.experts_down and c.routing
    logits = ops.linear(x, layer.router)
    routed = ops.moe(x, logits, layer.experts_up, layer.experts_down, c.routing, c.activation)
    if layer.experts_bias is None:
        return routed
    return ops.add(routed, ops.embedding(batch.positions, layer.experts_bias))

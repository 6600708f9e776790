"""DeepSeek V2 and V3: multi-head latent attention (MLA), and experts routed by groups. GLM-4.7-Flash is V3 by another
name; Youtu and MiniCPM3 have no experts, and MiniCPM3 scales embeddings, residuals and logits; A.X-K1 norms the output
of its experts; Mistral 4 scales queries by position.

DeepSeek V3.2 and GLM-5 attend to the `index_topk` positions that an indexer chooses (indexer.py). Where no context is
longer than that, it would choose all: its tensors are not read.

The cache holds one vector a token for all heads: a normed latent of `latent` columns (the nope part), and a key of
`rope_dim` columns (the rope part). A head's keys are W_k . latent and its values W_v . latent, and neither is computed:
W_k is absorbed into the query, which becomes W_k^T . q, and the attention output, a mean of latents, is multiplied by
W_v. (In a prompt this is more arithmetic than expanding keys and values; see docs/models.md.)"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.models.config import ModelConfig
from quire.models.gating import mul_sigmoid
from quire.models.indexer import Choice, Indexer, IndexerShape, choose, index_fields, indexer_specs
from quire.models.llama import UNUSED, QueryGrowth, query_growth, scaled
from quire.models.llama_families import minicpm_scales
from quire.models.loading import (
    EmbeddingTable,
    ExpertLinear,
    HeadLinear,
    Linear,
    LinearPart,
    LoadedModel,
    StackedHeadLinear,
    TensorSpecs,
    Vector,
    load_weights,
)
from quire.models.rope import RopeSpec, frequencies, read_rope, yarn_mscale
from quire.models.routing import grouped_sigmoid, grouped_softmax, softmax_of_best_two
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

LATENT_EPS = 1e-6  # of the norms of latents: no configuration has it
GATE_UP, DOWN = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj"
STACKED_GATE_UP, STACKED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"  # of all experts
INDEXER = r".*\.self_attn\.indexer\..*"


@dataclass(frozen=True, slots=True)
class DeepseekFamily:
    routing: Callable[[CheckpointConfig], Routing]
    has_experts: bool = True
    defaults: Callable[[CheckpointConfig], Mapping[str, Any]] | None = None  # of keys that config.json may not have
    scales: Callable[[CheckpointConfig], Mapping[str, Any]] | None = None  # -> factors of DeepseekConfig
    indexed: bool = False  # attention is sparse: an indexer chooses `index_topk` tokens
    interleaved_index: bool = False  # the indexer's rotary pairs are side by side
    post_moe_norm: bool = False  # the output of layers with experts is normed
    query_scaling: bool = False  # queries are scaled by their position: `llama_4_scaling_beta`


def minicpm3_defaults(hf: CheckpointConfig) -> dict[str, Any]:
    width = hf.int("hidden_size") // max(hf.int("num_attention_heads"), 1)
    return {"rope_interleave": False, "v_head_dim": width, "tie_word_embeddings": True}


def sarvam_keys(hf: CheckpointConfig) -> dict[str, Any]:
    """Its counts have other names, and its code has groups of eight experts, which its configuration does not."""
    experts = hf.int("num_experts")
    counts = {"n_routed_experts": experts, "n_shared_experts": hf.int("num_shared_experts", 1)}
    return counts | {"n_group": experts // 8, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}


FAMILIES = {
    "DeepseekV2ForCausalLM": DeepseekFamily(grouped_softmax),
    "DeepseekV3ForCausalLM": DeepseekFamily(grouped_sigmoid),
    "Glm4MoeLiteForCausalLM": DeepseekFamily(grouped_sigmoid),
    "SarvamMLAForCausalLM": DeepseekFamily(grouped_sigmoid, defaults=sarvam_keys),
    "YoutuForCausalLM": DeepseekFamily(grouped_sigmoid, has_experts=False),
    "MiniCPM3ForCausalLM": DeepseekFamily(grouped_sigmoid, False, minicpm3_defaults, minicpm_scales),
    "DeepseekV32ForCausalLM": DeepseekFamily(grouped_sigmoid, indexed=True),
    "GlmMoeDsaForCausalLM": DeepseekFamily(grouped_sigmoid, indexed=True, interleaved_index=True),
    "AXK1ForCausalLM": DeepseekFamily(grouped_sigmoid, post_moe_norm=True),
    "Mistral4ForCausalLM": DeepseekFamily(softmax_of_best_two, query_scaling=True),
}
# Keys that a configuration without experts does not have.
NO_EXPERTS = {"moe_intermediate_size": 0, "n_shared_experts": 0} | dict.fromkeys(
    ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"), 1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """`head_dim` is the width of a token's vector in the cache: latent + rope_dim."""

    nope_dim: int  # columns of a head's query that are not rotated
    rope_dim: int  # columns of a head's query, and of the key, that are rotated
    rope_interleaved: bool  # the checkpoint has the two columns of a rotary pair side by side
    split_kv_b: bool  # W_k (transposed) and W_v are two tensors: in GGUF files
    value_dim: int  # columns of a head's value
    q_lora_rank: int  # width of the latent that queries are computed from; 0: from the hidden state
    intermediate: int
    eps: float
    rope: RopeSpec
    scale: float  # of attention scores
    attention_bias: bool
    tied: bool
    num_dense: int  # layers before the first with experts
    num_experts: int
    expert_size: int
    shared_size: int  # of the shared experts together; 0: there are none
    routing: Routing
    num_mtp_layers: int  # layers behind the last that predict further tokens: mtp.py
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and feed-forward layers, before they are added
    logit_scale: float = 1.0
    post_moe_norm: bool = False  # the output of layers with experts is normed
    query_growth: QueryGrowth | None = None
    latent_scale: float = 1.0  # of the normed latent that is cached
    indexer: IndexerShape | None = None  # of sparse attention

    def has_indexer(self, layer: int) -> bool:
        return self.index is not None and self.indexer is not None and self.indexer.own[layer]

    @property
    def corrected(self) -> bool:
        """Whether a bias corrects the scores that experts are chosen by."""
        return self.routing.scoring == "sigmoid"


def config(hf: CheckpointConfig) -> DeepseekConfig:
    return DeepseekConfig(**config_fields(hf, FAMILIES[hf.architecture]))


def config_fields(hf: CheckpointConfig, family: DeepseekFamily) -> dict[str, Any]:
    """The fields of DeepseekConfig, to which other model files add their own."""
    hf.expect("hidden_act", "silu")
    hf = hf if family.has_experts else hf.with_values(NO_EXPERTS)
    if family.defaults:
        hf = hf.with_values({key: value for key, value in family.defaults(hf).items() if key not in hf})
    hf.expect("mlp_bias", False, None)
    hf.expect("moe_layer_freq", 1, None)
    latent, nope_dim, rope_dim = hf.int("kv_lora_rank"), hf.int("qk_nope_head_dim"), hf.int("qk_rope_head_dim")
    layers, expert_size = hf.int("num_hidden_layers"), hf.int("moe_intermediate_size")
    rope = read_rope(hf.with_values({"partial_rotary_factor": None}), rope_dim, hf.int("max_position_embeddings"))
    return {
        "architecture": hf.architecture,
        "hidden": hf.int("hidden_size"),
        "layers": layers,
        "heads": hf.int("num_attention_heads"),
        "kv_heads": 1,
        "head_dim": latent + rope_dim,
        "latent": latent,
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "rope_interleaved": hf.bool("rope_interleave", True),
        "split_kv_b": hf.bool("split_kv_b", False),
        "value_dim": hf.int("v_head_dim"),
        "q_lora_rank": hf.int("q_lora_rank", 0),
        "intermediate": hf.int("intermediate_size"),
        "vocab": hf.int("vocab_size"),
        "max_position": rope.default_length,
        "max_length": rope.max_length,
        "eps": hf.float("rms_norm_eps", 1e-6),
        "rope": rope,
        "scale": _scale(rope, nope_dim + rope_dim),
        "windows": (0,) * layers,
        "attention_bias": hf.bool("attention_bias", False),
        "tied": hf.bool("tie_word_embeddings", False),
        "num_dense": min(_num_dense(hf), layers) if family.has_experts else layers,
        "num_experts": hf.int("n_routed_experts"),
        "expert_size": expert_size,
        "shared_size": hf.int("n_shared_experts", 0) * expert_size,
        "routing": family.routing(hf),
        "num_mtp_layers": hf.int("num_nextn_predict_layers", 0),
        "post_moe_norm": family.post_moe_norm,
        "query_growth": query_growth(rope) if family.query_scaling else None,
        **(family.scales(hf) if family.scales else {}),
        **(index_fields(hf, family.interleaved_index) if family.indexed else {}),
    }


def _num_dense(hf: CheckpointConfig) -> int:
    kinds = hf.list("mlp_layer_types", [])
    if not kinds:
        return hf.int("first_k_dense_replace", 0)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise Unsupported("mlp_layer_types has layers of another kind, or without experts after the first with some")
    return dense


def _scale(rope: RopeSpec, head_dim: int) -> float:
    """YaRN's `mscale_all_dim` scales queries and keys, beside what `attention_factor` does to their rope parts."""
    mscale = rope.param("mscale_all_dim", 0.0) if rope.type == "yarn" else 0.0
    return (yarn_mscale(rope.factor, mscale) if mscale else 1.0) ** 2 / sqrt(head_dim)


def mtp_layers(layers: int, count: int) -> list[str]:
    """Patterns of the tensor names of `count` layers behind the last, which predict further tokens and are not read."""
    return [rf"model\.layers\.{layers + index}\..*" for index in range(count)]


def top_specs(c: DeepseekConfig) -> TensorSpecs:
    return {
        "embed": EmbeddingTable("model.embed_tokens", c.vocab, c.hidden),
        "norm": Vector("model.norm", c.hidden),
        "head": Linear({"model.embed_tokens" if c.tied else "lm_head": c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }


def layer_specs(c: DeepseekConfig, layer: int, stored: Container[str] = ()) -> TensorSpecs:
    return {
        "attn_norm": Vector("input_layernorm", c.hidden),
        **_query_specs(c),
        "latent_norm": Vector("self_attn.kv_a_layernorm", c.latent),
        **_up_specs(c),
        **(indexer_specs(c.indexer, c.hidden, c.q_lora_rank) if c.indexer and c.has_indexer(layer) else {}),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.heads * c.value_dim, bias=c.attention_bias),
        "mlp_norm": Vector("post_attention_layernorm", c.hidden),
        **feed_forward_specs(c, layer, stored),
    }


def feed_forward_specs(c: DeepseekConfig, layer: int, stored: Container[str] = ()) -> TensorSpecs:
    return _mlp_specs("mlp", c.hidden, c.intermediate) if layer < c.num_dense else _moe_specs(c, layer, stored)


def _query_specs(c: DeepseekConfig) -> TensorSpecs:
    """Computed from the hidden state: queries (or their latent), then what is cached of a token."""
    cached = LinearPart(c.head_dim, np.concatenate([np.arange(c.latent), c.latent + _rope_order(c)]).astype(np.int32))
    queries = LinearPart(c.heads * (c.nope_dim + c.rope_dim), _query_order(c), bias=False)
    parts: Mapping[str, int | LinearPart] = {"self_attn.q_proj": queries}
    if c.q_lora_rank:
        parts = {"self_attn.q_a_proj": c.q_lora_rank}
    attn_in = Linear({**parts, "self_attn.kv_a_proj_with_mqa": cached}, c.hidden, bias=c.attention_bias)
    if not c.q_lora_rank:
        return {"attn_in": attn_in}
    norm = Vector("self_attn.q_a_layernorm", c.q_lora_rank)
    return {"attn_in": attn_in, "query_norm": norm, "query_up": Linear({"self_attn.q_b_proj": queries}, c.q_lora_rank)}


def _up_specs(c: DeepseekConfig) -> TensorSpecs:
    if c.split_kv_b:
        return {
            "key_up": StackedHeadLinear("self_attn.k_b_proj", c.heads, c.latent, c.nope_dim),
            "value_up": StackedHeadLinear("self_attn.v_b_proj", c.heads, c.value_dim, c.latent),
        }
    stored = ("self_attn.kv_b_proj", c.heads, c.nope_dim + c.value_dim, c.latent)
    return {
        "key_up": HeadLinear(*stored, first=0, count=c.nope_dim, transposed=True),
        "value_up": HeadLinear(*stored, first=c.nope_dim, count=c.value_dim),
    }


def _rope_order(c: DeepseekConfig) -> NDArray[np.int32]:
    """We rotate column i with column i + rope_dim / 2; the checkpoint may rotate 2i with 2i + 1."""
    columns = np.arange(c.rope_dim, dtype=np.int32)
    return np.concatenate([columns[::2], columns[1::2]]) if c.rope_interleaved else columns


def _query_order(c: DeepseekConfig) -> NDArray[np.int32]:
    """The nope parts of all heads, then their rope parts."""
    first = np.arange(c.heads, dtype=np.int32)[:, None] * (c.nope_dim + c.rope_dim)
    nope, rope = first + np.arange(c.nope_dim, dtype=np.int32), first + c.nope_dim + _rope_order(c)
    return np.concatenate([nope.ravel(), rope.ravel()])


def _mlp_specs(name: str, hidden: int, size: int) -> TensorSpecs:
    gate_up = Linear({f"{name}.gate_proj": size, f"{name}.up_proj": size}, hidden)
    return {"gate_up": gate_up, "down": Linear({f"{name}.down_proj": hidden}, size)}


def _moe_specs(c: DeepseekConfig, layer: int, stored: Container[str]) -> TensorSpecs:
    size = c.expert_size
    stacked = f"model.layers.{layer}.{STACKED_DOWN}" in stored
    gate_up = {STACKED_GATE_UP: 2 * size} if stacked else dict.fromkeys(GATE_UP, size)
    correction = Vector("mlp.gate", c.num_experts, suffix="e_score_correction_bias")
    return {
        "router": Linear({"mlp.gate": c.num_experts}, c.hidden, keep=Keep.ALL),
        "experts_up": ExpertLinear(gate_up, c.hidden, c.num_experts),
        "experts_down": ExpertLinear({STACKED_DOWN if stacked else DOWN: c.hidden}, size, c.num_experts),
        **({"moe_norm": Vector("post_mlp_layernorm", c.hidden)} if c.post_moe_norm else {}),
        **({"correction": correction} if c.corrected else {}),
        **(_mlp_specs("mlp.shared_experts", c.hidden, c.shared_size) if c.shared_size else {}),
    }


@dataclass(frozen=True, slots=True)
class DeepseekMlp:
    gate_up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True, slots=True)
class DeepseekMoe:
    router: PackedWeight
    experts_up: PackedExperts
    experts_down: PackedExperts
    correction: Any = None
    moe_norm: Any = None  # of the output, with that of the shared experts


@dataclass(frozen=True, slots=True)
class DeepseekLayer:
    attn_norm: Any
    attn_in: PackedWeight  # hidden -> queries (or their latent), the latent, the key's rope part
    latent_norm: Any
    key_up: PackedHeads  # nope_dim -> latent
    value_up: PackedHeads  # latent -> value_dim
    out: PackedWeight
    mlp_norm: Any
    query_norm: Any = None
    query_up: PackedWeight | None = None
    gate: PackedWeight | None = None  # of the output of attention
    mlp: DeepseekMlp | None = None  # beside routed experts: the shared experts
    moe: DeepseekMoe | None = None
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class DeepseekWeights:
    embed: Any
    layers: list[DeepseekLayer]
    norm: Any
    head: PackedWeight
    rope: Any  # rotary frequencies


def load(ops: OpSet, checkpoint: Checkpoint, config: DeepseekConfig, max_model_len: int) -> LoadedModel:
    config = config.at_length(max_model_len)
    ignored = mtp_layers(config.layers, config.num_mtp_layers)
    ignored += ["lm_head.weight"] if config.tied else []
    ignored += [] if config.index else [INDEXER]
    unused = "|".join([UNUSED, *ignored])
    stored = set(checkpoint.names())
    by_prefix = {f"model.layers.{layer}.": layer_specs(config, layer, stored) for layer in range(config.layers)}
    top, layers = load_weights(ops, checkpoint, top_specs(config), by_prefix, unused)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = DeepseekWeights(**top, layers=[new_layer(layer) for layer in layers], rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def new_layer(loaded: Mapping[str, Any], kind: type[DeepseekLayer] = DeepseekLayer) -> DeepseekLayer:
    """A layer of weights under the names of the fields; others are left out."""

    def of(part: type[Any]) -> dict[str, Any]:
        return {field.name: loaded[field.name] for field in fields(part) if field.name in loaded}

    parts = {"mlp": DeepseekMlp, "moe": DeepseekMoe, "indexer": Indexer}
    made = {name: part(**given) for name, part in parts.items() if (given := of(part))}
    return kind(**of(kind), **made)


def forward(c: DeepseekConfig, w: DeepseekWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x, choice = scaled(ops, ops.embedding(batch.ids, w.embed), c.embed_scale), Choice()
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        x = block(c, layer, index, ops, x, angles, batch, choice)
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(scaled(ops, x, c.logit_scale), w.head, batch)


def block(
    c: DeepseekConfig,
    layer: DeepseekLayer,
    index: int,
    ops: OpSet,
    x: Value,
    angles: Value,
    batch: Any,
    choice: Choice,
) -> Value:
    h = attention(c, layer, index, ops, ops.rms_norm(x, layer.attn_norm, c.eps), angles, batch, choice)
    x = ops.add(x, scaled(ops, h, c.residual_scale))
    h = feed_forward(c, layer, ops, ops.rms_norm(x, layer.mlp_norm, c.eps))
    return ops.add(x, scaled(ops, h, c.residual_scale))


def attention(
    c: DeepseekConfig,
    layer: DeepseekLayer,
    index: int,
    ops: OpSet,
    x: Value,
    angles: Value | None,
    batch: Any,
    choice: Choice,
) -> Value:
    """`angles`: None where nothing is rotated."""

    def rotated(part: Value) -> Value:
        return part if angles is None else ops.rope(part, angles, c.rope_dim)

    nope, rope = c.heads * c.nope_dim, c.heads * c.rope_dim
    attn_in = ops.linear(x, layer.attn_in)
    if layer.query_up is None:
        q_nope, q_rope, latent, k_rope = ops.split(attn_in, (nope, rope, c.latent, c.rope_dim))
    else:
        q_latent, latent, k_rope = ops.split(attn_in, (c.q_lora_rank, c.latent, c.rope_dim))
        q_latent = ops.rms_norm(q_latent, layer.query_norm, LATENT_EPS)
        if layer.indexer is not None and c.indexer is not None:
            choice.positions = choose(c.indexer, layer.indexer, index, ops, x, q_latent, angles, batch)
        q_nope, q_rope = ops.split(ops.linear(q_latent, layer.query_up), (nope, rope))
    if c.query_growth:
        growth, length = c.query_growth.growth, c.query_growth.length
        q_nope, q_rope = (ops.scale_by_position(q, batch.positions, growth, length) for q in (q_nope, q_rope))
    latent = scaled(ops, ops.rms_norm(latent, layer.latent_norm, LATENT_EPS), c.latent_scale)
    ops.write_latent(latent, rotated(k_rope), batch, index)
    attended = ops.mla_attention(
        ops.linear_heads(q_nope, layer.key_up), rotated(q_rope), batch, index, c.scale, choice.positions
    )
    values = ops.linear_heads(attended, layer.value_up)
    if layer.gate is not None:
        values = mul_sigmoid(ops, values, ops.linear(x, layer.gate))
    return ops.linear(values, layer.out)


def feed_forward(c: DeepseekConfig, layer: DeepseekLayer, ops: OpSet, x: Value) -> Value:
    dense = None if layer.mlp is None else mlp(layer.mlp, ops, x)
    if layer.moe is None:
        return dense
    m = layer.moe
    logits = ops.linear(x, m.router)
    routed = ops.moe(x, logits, m.experts_up, m.experts_down, c.routing, Activation.SILU, m.correction)
    output = routed if dense is None else ops.add(routed, dense)
    return output if m.moe_norm is None else ops.rms_norm(output, m.moe_norm, c.eps)


def mlp(w: DeepseekMlp, ops: OpSet, x: Value) -> Value:
    return ops.linear(ops.activate_and_mul(ops.linear(x, w.gate_up), Activation.SILU), w.down)

"""DeepSeek V2 and V3: attention to a latent cache, and experts routed by groups. GLM-4.7-Flash is V3 under
another name, Youtu the same without experts.

A token leaves one vector in the cache for all heads: a normed latent of `latent` columns, and `turning` columns that
are rotated. A head's keys are W_k . latent and its values W_v . latent. Neither is ever computed: a query meets the
latent as W_k^T . q, and what it finds there, a mean of latents, is multiplied by W_v. (In a prompt that is more
arithmetic than expanding keys and values would be; see docs/models.md.)"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.models.config import ModelConfig
from quire.models.llama import UNUSED
from quire.models.loading import (
    Experts,
    Heads,
    LoadedModel,
    Matrix,
    StackedHeads,
    TensorPart,
    TokenTable,
    Vector,
    Wanted,
    load_weights,
)
from quire.models.rope import RopeSpec, frequencies, read_rope, yarn_temperature
from quire.models.routing import grouped_sigmoid, grouped_softmax
from quire.ops.opset import Activation, Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

LATENT_EPS = 1e-6  # of the norms of latents: no configuration says it


@dataclass(frozen=True, slots=True)
class DeepseekFamily:
    routing: Callable[[CheckpointConfig], Routing]
    has_experts: bool = True


FAMILIES = {
    "DeepseekV2ForCausalLM": DeepseekFamily(grouped_softmax),
    "DeepseekV3ForCausalLM": DeepseekFamily(grouped_sigmoid),
    "Glm4MoeLiteForCausalLM": DeepseekFamily(grouped_sigmoid),
    "YoutuForCausalLM": DeepseekFamily(grouped_sigmoid, has_experts=False),
}
# Keys that a configuration without experts does not have.
NO_EXPERTS = {"moe_intermediate_size": 0, "n_shared_experts": 0} | dict.fromkeys(
    ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"), 1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """`head_dim` is the width of a token's vector in the cache: latent + turning."""

    still: int  # columns of a query that are not rotated
    turning: int  # those that are, and those of the key
    interleaved: bool  # whether those that turn together lie side by side in the checkpoint
    apart: bool  # whether W_k (turned) and W_v are tensors of their own: in GGUF files
    value: int  # columns of a head's value
    q_rank: int  # of the latent that queries are made of; 0: they are made of the hidden state
    intermediate: int
    eps: float
    rope: RopeSpec
    scale: float  # of attention scores
    attention_bias: bool
    tied: bool
    num_dense: int  # layers before the first with experts
    experts: int
    expert_size: int
    shared_size: int  # of the experts that all tokens go to, side by side; 0: none
    routing: Routing
    num_predicting: int  # layers behind the last that guess further tokens: not read

    @property
    def corrected(self) -> bool:
        """Whether experts are chosen by corrected scores."""
        return self.routing.scoring == "sigmoid"


def config(hf: CheckpointConfig) -> DeepseekConfig:
    hf.expect("hidden_act", "silu")
    family = FAMILIES[hf.architecture]
    hf = hf if family.has_experts else hf.with_values(NO_EXPERTS)
    hf.expect("mlp_bias", False, None)
    hf.expect("moe_layer_freq", 1, None)
    latent, still, turning = hf.int("kv_lora_rank"), hf.int("qk_nope_head_dim"), hf.int("qk_rope_head_dim")
    layers, expert_size = hf.int("num_hidden_layers"), hf.int("moe_intermediate_size")
    rope = read_rope(hf, turning, hf.int("max_position_embeddings"))
    return DeepseekConfig(
        architecture=hf.architecture,
        hidden=hf.int("hidden_size"),
        layers=layers,
        heads=hf.int("num_attention_heads"),
        kv_heads=1,
        head_dim=latent + turning,
        latent=latent,
        still=still,
        turning=turning,
        interleaved=hf.bool("rope_interleave", True),
        apart=hf.bool("kv_b_apart", False),
        value=hf.int("v_head_dim"),
        q_rank=hf.int("q_lora_rank", 0),
        intermediate=hf.int("intermediate_size"),
        vocab=hf.int("vocab_size"),
        max_position=rope.default_length,
        longest=rope.longest,
        eps=hf.float("rms_norm_eps", 1e-6),
        rope=rope,
        scale=_scale(rope, still + turning),
        windows=(0,) * layers,
        attention_bias=hf.bool("attention_bias", False),
        tied=hf.bool("tie_word_embeddings", False),
        num_dense=min(_num_dense(hf), layers) if family.has_experts else layers,
        experts=hf.int("n_routed_experts"),
        expert_size=expert_size,
        shared_size=hf.int("n_shared_experts", 0) * expert_size,
        routing=family.routing(hf),
        num_predicting=hf.int("num_nextn_predict_layers", 0),
    )


def _num_dense(hf: CheckpointConfig) -> int:
    kinds = hf.list("mlp_layer_types", [])
    if not kinds:
        return hf.int("first_k_dense_replace", 0)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise Unsupported("mlp_layer_types has layers of another kind, or without experts after the first with some")
    return dense


def _scale(rope: RopeSpec, head_dim: int) -> float:
    """YaRN makes long contexts sharper: on queries and keys here, not (or not only) in their rotation."""
    sharper = rope.number("mscale_all_dim", 0.0) if rope.type == "yarn" else 0.0
    return (yarn_temperature(rope.stretch, sharper) if sharper else 1.0) ** 2 / sqrt(head_dim)


def predicting_layers(layers: int, count: int) -> list[str]:
    """Patterns of the names of `count` layers behind the last, which guess further tokens and are not read."""
    return [rf"model\.layers\.{layers + index}\..*" for index in range(count)]


def top_names(c: DeepseekConfig) -> Wanted:
    return {
        "embed": TokenTable("model.embed_tokens", c.vocab, c.hidden),
        "norm": Vector("model.norm", c.hidden),
        "head": Matrix({"model.embed_tokens" if c.tied else "lm_head": c.vocab}, c.hidden, keep=Keep.EIGHT_BITS),
    }


def layer_names(c: DeepseekConfig, layer: int) -> Wanted:
    return {
        "norm1": Vector("input_layernorm", c.hidden),
        **_query_names(c),
        "latent_norm": Vector("self_attn.kv_a_layernorm", c.latent),
        **_up_names(c),
        "out": Matrix({"self_attn.o_proj": c.hidden}, c.heads * c.value, bias=c.attention_bias),
        "norm2": Vector("post_attention_layernorm", c.hidden),
        **(_mlp_names("mlp", c.hidden, c.intermediate) if layer < c.num_dense else _moe_names(c)),
    }


def _query_names(c: DeepseekConfig) -> Wanted:
    """What is made of the hidden state: queries, or the latent that they are made of, and behind it what is cached."""
    cached = TensorPart(
        c.head_dim, np.concatenate([np.arange(c.latent), c.latent + _turning_order(c)]).astype(np.int32)
    )
    queries = TensorPart(c.heads * (c.still + c.turning), _query_order(c), bias=False)
    parts: Mapping[str, int | TensorPart] = {"self_attn.q_proj": queries}
    if c.q_rank:
        parts = {"self_attn.q_a_proj": c.q_rank}
    attn_in = Matrix({**parts, "self_attn.kv_a_proj_with_mqa": cached}, c.hidden, bias=c.attention_bias)
    if not c.q_rank:
        return {"attn_in": attn_in}
    norm = Vector("self_attn.q_a_layernorm", c.q_rank)
    return {"attn_in": attn_in, "query_norm": norm, "query_up": Matrix({"self_attn.q_b_proj": queries}, c.q_rank)}


def _up_names(c: DeepseekConfig) -> Wanted:
    if c.apart:
        return {
            "key_up": StackedHeads("self_attn.k_b_proj", c.heads, c.latent, c.still),
            "value_up": StackedHeads("self_attn.v_b_proj", c.heads, c.value, c.latent),
        }
    stored = ("self_attn.kv_b_proj", c.heads, c.still + c.value, c.latent)
    return {
        "key_up": Heads(*stored, first=0, count=c.still, transposed=True),
        "value_up": Heads(*stored, first=c.still, count=c.value),
    }


def _turning_order(c: DeepseekConfig) -> NDArray[np.int32]:
    """We turn column i with column i + turning / 2; the checkpoint may turn 2i with 2i + 1."""
    columns = np.arange(c.turning, dtype=np.int32)
    return np.concatenate([columns[::2], columns[1::2]]) if c.interleaved else columns


def _query_order(c: DeepseekConfig) -> NDArray[np.int32]:
    """First what does not turn of all heads, then what does."""
    first = np.arange(c.heads, dtype=np.int32)[:, None] * (c.still + c.turning)
    still, turning = first + np.arange(c.still, dtype=np.int32), first + c.still + _turning_order(c)
    return np.concatenate([still.ravel(), turning.ravel()])


def _mlp_names(name: str, hidden: int, size: int) -> Wanted:
    gate_up = Matrix({f"{name}.gate_proj": size, f"{name}.up_proj": size}, hidden)
    return {"gate_up": gate_up, "down": Matrix({f"{name}.down_proj": hidden}, size)}


def _moe_names(c: DeepseekConfig) -> Wanted:
    size = c.expert_size
    correction = Vector("mlp.gate", c.experts, of="e_score_correction_bias")
    return {
        "router": Matrix({"mlp.gate": c.experts}, c.hidden, keep=Keep.ALL),
        "experts_up": Experts({"mlp.experts.{}.gate_proj": size, "mlp.experts.{}.up_proj": size}, c.hidden, c.experts),
        "experts_down": Experts({"mlp.experts.{}.down_proj": c.hidden}, size, c.experts),
        **({"correction": correction} if c.corrected else {}),
        **(_mlp_names("mlp.shared_experts", c.hidden, c.shared_size) if c.shared_size else {}),
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


@dataclass(frozen=True, slots=True)
class DeepseekLayer:
    norm1: Any
    attn_in: PackedWeight  # hidden -> queries or their latent, the latent, and the key's columns that turn
    latent_norm: Any
    key_up: PackedHeads  # still -> latent
    value_up: PackedHeads  # latent -> value
    out: PackedWeight
    norm2: Any
    query_norm: Any = None
    query_up: PackedWeight | None = None
    mlp: DeepseekMlp | None = None  # of all tokens: beside routed experts, the shared ones
    moe: DeepseekMoe | None = None


@dataclass(frozen=True, slots=True)
class DeepseekWeights:
    embed: Any
    layers: list[DeepseekLayer]
    norm: Any
    head: PackedWeight
    rope: Any  # rotary frequencies


def load(ops: OpSet, checkpoint: Checkpoint, config: DeepseekConfig, max_model_len: int) -> LoadedModel:
    predicting = predicting_layers(config.layers, config.num_predicting)
    unused = "|".join([UNUSED, *predicting, *(["lm_head.weight"] if config.tied else [])])
    named = {f"model.layers.{layer}.": layer_names(config, layer) for layer in range(config.layers)}
    top, layers = load_weights(ops, checkpoint, top_names(config), named, unused)
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = DeepseekWeights(**top, layers=[_layer(layer) for layer in layers], rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def _layer(loaded: Mapping[str, Any]) -> DeepseekLayer:
    def of(kind: type[Any]) -> dict[str, Any]:
        return {field.name: loaded[field.name] for field in fields(kind) if field.name in loaded}

    mlp, moe = of(DeepseekMlp), of(DeepseekMoe)
    return DeepseekLayer(
        **of(DeepseekLayer), mlp=DeepseekMlp(**mlp) if mlp else None, moe=DeepseekMoe(**moe) if moe else None
    )


def forward(c: DeepseekConfig, w: DeepseekWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.layers):
        x = ops.add(x, attention(c, layer, index, ops, ops.rms_norm(x, layer.norm1, c.eps), angles, batch))
        x = ops.add(x, feed_forward(c, layer, ops, ops.rms_norm(x, layer.norm2, c.eps)))
    return ops.logits(ops.rms_norm(x, w.norm, c.eps), w.head, batch)


def attention(
    c: DeepseekConfig, layer: DeepseekLayer, index: int, ops: OpSet, x: Value, angles: Value, batch: Any
) -> Value:
    still, turning = c.heads * c.still, c.heads * c.turning
    if layer.query_up is None:
        q, q_turned, latent, turned = ops.split(ops.linear(x, layer.attn_in), (still, turning, c.latent, c.turning))
    else:
        q_latent, latent, turned = ops.split(ops.linear(x, layer.attn_in), (c.q_rank, c.latent, c.turning))
        queries = ops.linear(ops.rms_norm(q_latent, layer.query_norm, LATENT_EPS), layer.query_up)
        q, q_turned = ops.split(queries, (still, turning))
    latent = ops.rms_norm(latent, layer.latent_norm, LATENT_EPS)
    ops.write_latent(latent, ops.rope(turned, angles, c.turning), batch, index)
    q = ops.linear_heads(q, layer.key_up)
    found = ops.mla_attention(q, ops.rope(q_turned, angles, c.turning), batch, index, c.scale)
    return ops.linear(ops.linear_heads(found, layer.value_up), layer.out)


def feed_forward(c: DeepseekConfig, layer: DeepseekLayer, ops: OpSet, x: Value) -> Value:
    dense = None if layer.mlp is None else mlp(layer.mlp, ops, x)
    if layer.moe is None:
        return dense
    m = layer.moe
    logits = ops.linear(x, m.router)
    found = ops.moe(x, logits, m.experts_up, m.experts_down, c.routing, Activation.SILU, m.correction)
    return found if dense is None else ops.add(found, dense)


def mlp(w: DeepseekMlp, ops: OpSet, x: Value) -> Value:
    return ops.linear(ops.activate_and_mul(ops.linear(x, w.gate_up), Activation.SILU), w.down)

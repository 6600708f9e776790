"""Kimi Linear: DeepSeek V3's latent attention, without rope, in every fourth layer; Kimi delta attention in the others.

Kimi delta attention is a gated delta net in which each row of a state has a decay of its own. The inputs of the decays
and of the output's gate come through a bottleneck of one head's width."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.models import deepseek
from quire.models.config import ATTENTION
from quire.models.deepseek import DeepseekConfig, DeepseekFamily, DeepseekLayer, DeepseekWeights
from quire.models.delta_net import (
    LINEAR,
    ConvWeight,
    DecayRate,
    DeltaShape,
    attend,
    gated_norm,
    gates,
    hybrid_fields,
    layer_kinds,
    state_specs,
)
from quire.models.indexer import Choice
from quire.models.llama import UNUSED
from quire.models.loading import Linear, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.routing import grouped_sigmoid
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = DeepseekFamily(grouped_sigmoid)
KEYS = {  # DeepSeek's -> Kimi's
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
EXPERT_KEYS = ("num_local_experts", "num_experts")
RENAMED = {
    ".block_sparse_moe.": ".mlp.",
    ".self_attn.forget_gate.": ".self_attn.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(DeepseekConfig):
    delta: DeltaShape
    converted: bool  # the checkpoint is a GGUF file


def config(hf: CheckpointConfig) -> KimiLinearConfig:
    hf.expect("moe_router_activation_func", "sigmoid", None)
    hf.expect("mla_use_nope", True, None)
    experts = next((hf.int(key) for key in EXPERT_KEYS if key in hf), 256)
    values = {ours: hf.get(theirs) for ours, theirs in KEYS.items() if ours not in hf}
    values |= {"n_routed_experts": experts, "rope_interleave": False, "rope_scaling": None, "rope_parameters": None}
    fields = deepseek.config_fields(hf.with_values(values), FAMILY)
    layers, section = fields["layers"], hf.section("linear_attn_config")
    heads = section.int("num_heads", hf.int("linear_num_heads", 32))
    head_dim = section.int("head_dim", hf.int("linear_head_dim", 128))
    taps = section.int("short_conv_kernel_size", hf.int("linear_conv_kernel_dim", 4))
    shape = DeltaShape(heads, heads, head_dim, head_dim, taps, gate=Activation.SIGMOID)
    kinds = layer_kinds(hf, layers, _default_kinds(section, layers))
    return KimiLinearConfig(**hybrid_fields(fields, kinds, shape), converted=hf.bool("converted", False))


def _default_kinds(section: CheckpointConfig, layers: int) -> list[str]:
    """Published checkpoints list the layers of each kind, counted from 1."""
    attending = section.list("full_attn_layers", [layer + 1 for layer in range(layers) if layer and layer % 4 == 0])
    return [ATTENTION if layer + 1 in attending else LINEAR for layer in range(layers)]


# -- tensors -----------------------------------------------------------------------------------------------------------


def layer_specs(c: KimiLinearConfig, layer: int, split_conv: bool) -> TensorSpecs:
    if c.kinds[layer] == ATTENTION:
        return deepseek.layer_specs(c, layer)
    return {
        "attn_norm": Vector("input_layernorm", c.hidden),
        **delta_specs(c, split_conv),
        "mlp_norm": Vector("post_attention_layernorm", c.hidden),
        **deepseek.feed_forward_specs(c, layer),
    }


def delta_specs(c: KimiLinearConfig, split_conv: bool) -> TensorSpecs:
    s, prefix = c.delta, "self_attn"
    parts = {f"{prefix}.{name}_conv1d": s.key_size for name in "qkv"}
    conv = ConvWeight(parts if split_conv else {f"{prefix}.conv1d": s.channels}, s.taps)
    shape = (s.heads, 1) if c.converted else (1, 1, s.heads, 1)
    rates = DecayRate(f"{prefix}.{'A' if c.converted else 'A_log'}", shape, s.key_dim, negated=c.converted)
    narrow = {f"{prefix}.f_a_proj": s.key_dim, f"{prefix}.g_a_proj": s.value_dim, f"{prefix}.b_proj": s.heads}
    return {
        "delta_in": Linear({f"{prefix}.{name}_proj": s.key_size for name in "qkv"}, c.hidden),
        "delta_gates": gates(narrow, c.hidden),
        "decay_up": Linear({f"{prefix}.f_b_proj": s.key_size}, s.key_dim, keep=Keep.ALL),
        "gate_up_of_output": Linear({f"{prefix}.g_b_proj": s.value_size}, s.value_dim),
        "out": Linear({f"{prefix}.o_proj": c.hidden}, s.value_size),
        **state_specs(s, conv, rates, Vector(prefix, s.key_size, "dt_bias"), f"{prefix}.o_norm"),
    }


@dataclass(frozen=True, slots=True)
class KimiLinearLayer(DeepseekLayer):
    """With latent attention, or with Kimi delta attention, in which `attn_in` is None."""

    attn_norm: Any = None
    attn_in: Any = None
    latent_norm: Any = None
    key_up: Any = None
    value_up: Any = None
    out: Any = None
    mlp_norm: Any = None
    delta_in: Any = None  # hidden -> q, k, v
    delta_gates: Any = None  # hidden -> the narrow inputs of decay and gate, and that of beta
    decay_up: Any = None
    gate_up_of_output: Any = None
    conv: Any = None
    q_norm: Any = None
    k_norm: Any = None
    decay_rate: Any = None
    decay_bias: Any = None
    delta_norm: Any = None


FeedForward = Callable[[Any, Any, OpSet, Value], Value]  # (config, layer, ops, x)
DeltaAttention = Callable[[Any, Any, int, OpSet, Value, Any], Value]  # (config, layer, number, ops, x, batch)


# -- forward -----------------------------------------------------------------------------------------------------------


def load(ops: OpSet, checkpoint: Checkpoint, config: KimiLinearConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, RENAMED)
    split_conv = has_split_convs(checkpoint.names())
    by_prefix = {f"model.layers.{layer}.": layer_specs(config, layer, split_conv) for layer in range(config.layers)}
    unused = "|".join([UNUSED, *(["lm_head.weight"] if config.tied else [])])
    top, layers = load_weights(ops, checkpoint, deepseek.top_specs(config), by_prefix, unused)
    loaded = [deepseek.new_layer(layer, KimiLinearLayer) for layer in layers]
    weights = DeepseekWeights(**top, layers=loaded, rope=None)
    return LoadedModel(config, partial(forward, config, weights), [top, *layers])


def has_split_convs(names: Collection[str]) -> bool:
    """Whether q, k and v have convolutions of their own, as published."""
    return any(".q_conv1d." in name for name in names)


def forward(
    c: KimiLinearConfig,
    w: DeepseekWeights,
    ops: OpSet,
    batch: Any,
    delta: DeltaAttention | None = None,  # in place of `delta_attention`
    feed_forward: FeedForward = deepseek.feed_forward,
) -> Value:
    angles = None if w.rope is None else ops.rope_angles(batch.positions, w.rope)
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        number, normed = c.index_of_kind(index), ops.rms_norm(x, layer.attn_norm, c.eps)
        if c.kinds[index] == ATTENTION:
            mixed = deepseek.attention(c, layer, number, ops, normed, angles, batch, Choice())
        else:
            mixed = (delta or delta_attention)(c, layer, number, ops, normed, batch)
        x = ops.add(x, mixed)
        x = ops.add(x, feed_forward(c, layer, ops, ops.rms_norm(x, layer.mlp_norm, c.eps)))
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch)


def delta_attention(c: KimiLinearConfig, layer: Any, number: int, ops: OpSet, x: Value, batch: Any) -> Value:
    s = c.delta
    narrow = ops.linear(x, layer.delta_gates)
    decay_in, gate_in, beta = ops.split(narrow, (s.key_dim, s.value_dim, s.heads))
    decay = ops.decay(ops.linear(decay_in, layer.decay_up), layer.decay_bias, layer.decay_rate)
    attended = attend(s, layer, number, ops, ops.linear(x, layer.delta_in), decay, beta, batch)
    gate = ops.linear(gate_in, layer.gate_up_of_output)
    return ops.linear(gated_norm(s, ops, attended, gate, layer.delta_norm, c.eps), layer.out)

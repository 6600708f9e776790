"""Ling 3.0: Kimi Linear whose latent attention has rope and a gate for each head.

In its delta attention, the inputs of decays and of the output's gate have the full width, and a decay may have a bound:
exp(bound * sigmoid(rate * (x + bias))), which is safe to compute in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models import deepseek, kimi_linear
from quire.models.config import ATTENTION
from quire.models.deepseek import DeepseekWeights, mtp_layers
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
from quire.models.kimi_linear import KEYS, KimiLinearConfig, KimiLinearLayer, has_split_convs
from quire.models.llama import UNUSED
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.rope import frequencies
from quire.models.step3p5 import Limit, clamped, read_limits
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

RENAMED = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.forget_gate.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}
EXPERTS = {"n_routed_experts": ("num_local_experts", "num_experts"), "num_nextn_predict_layers": ("num_mtp_layers",)}
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


@dataclass(frozen=True, slots=True, kw_only=True)
class BailingHybridConfig(KimiLinearConfig):
    decay_bound: float | None  # None: decays are those of Kimi Linear
    limits: tuple[float, ...]  # of activations of experts, in each layer; 0: none
    shared_limits: tuple[float, ...]  # of the shared experts


def config(hf: CheckpointConfig) -> BailingHybridConfig:
    for key, value in (("no_kda_lora", True), ("gated_attention_proj_granularity_type", "head_wise")):
        hf.expect(key, value, None)
    for key in ("use_bias", "use_qkv_bias"):
        hf.expect(key, False, None)
    hf.expect("score_function", "sigmoid", None)
    names = {ours: (theirs,) for ours, theirs in KEYS.items()} | EXPERTS
    given = {ours: next((hf.get(key) for key in keys if key in hf), None) for ours, keys in names.items()}
    values = {ours: value for ours, value in given.items() if ours not in hf}
    values["rope_theta"] = hf.float("rope_theta", 6_000_000.0)
    adapted = hf.with_values(values)
    fields = deepseek.config_fields(adapted, kimi_linear.FAMILY)
    if "moe_shared_expert_intermediate_size" in hf:
        size = hf.int("moe_shared_expert_intermediate_size")
        fields["shared_size"] = adapted.int("n_shared_experts", 0) * size
    layers, heads = fields["layers"], fields["heads"]
    width = hf.int("linear_head_dim", hf.int("head_dim", 128))
    taps = hf.int("short_conv_kernel_size", hf.int("linear_conv_kernel_dim", 4))
    shape = DeltaShape(heads, heads, width, width, taps, gate=Activation.SIGMOID)
    kinds = layer_kinds(hf, layers, _default_kinds(hf, layers))
    return BailingHybridConfig(
        **hybrid_fields(fields, kinds, shape),
        converted=hf.bool("converted", False),
        decay_bound=_decay_bound(hf) if hf.bool("kda_safe_gate", True) else None,
        limits=read_limits(_without_later(hf, layers), LIMITS[0], layers),
        shared_limits=read_limits(_without_later(hf, layers), LIMITS[1], layers),
    )


def _default_kinds(hf: CheckpointConfig, layers: int) -> list[str]:
    """The last layer of every group has attention, and all layers behind the last whole group."""
    size = hf.int("layer_group_size", 6, minimum=1)
    whole = layers // size * size
    return [ATTENTION if (layer + 1) % size == 0 or layer >= whole else LINEAR for layer in range(layers)]


def _decay_bound(hf: CheckpointConfig) -> float:
    bound = hf.float("kda_lower_bound", -5.0)
    if bound >= 0:
        raise BadCheckpoint(f"kda_lower_bound is {bound}, and decays need one below 0")
    return bound


def _without_later(hf: CheckpointConfig, layers: int) -> CheckpointConfig:
    """Lists of limits may be too short, and are then 0 in the layers behind."""
    lists = {key: list(hf.get(key)) for key in LIMITS if isinstance(hf.get(key), Sequence)}
    return hf.with_values({key: (listed + [0] * layers)[:layers] for key, listed in lists.items()})


# -- tensors -----------------------------------------------------------------------------------------------------------


def layer_specs(c: BailingHybridConfig, layer: int, checkpoint: Checkpoint) -> TensorSpecs:
    stored = set(checkpoint.names())
    limits = {"limit": Limit(c.limits[layer]), "shared_limit": Limit(c.shared_limits[layer])}
    limits = {} if layer < c.num_dense else limits
    if c.kinds[layer] == ATTENTION:
        size, repeated = c.heads * c.value_dim, np.repeat(np.arange(c.heads, dtype=np.int32), c.value_dim)
        gate = LinearPart(size, repeated, num_stored=c.heads)  # a gate for each column of a head
        gate_spec = Linear({"self_attn.g_proj": gate}, c.hidden)
        return {**deepseek.layer_specs(c, layer, stored), "gate": gate_spec, **limits}
    return {
        "attn_norm": Vector("input_layernorm", c.hidden),
        **delta_specs(c, f"model.layers.{layer}.", checkpoint),
        "mlp_norm": Vector("post_attention_layernorm", c.hidden),
        **deepseek.feed_forward_specs(c, layer, stored),
        **limits,
    }


def delta_specs(c: BailingHybridConfig, layer: str, checkpoint: Checkpoint) -> TensorSpecs:
    s, prefix, stored = c.delta, "self_attn", checkpoint.names()
    parts = {f"{prefix}.{name}_conv1d": s.key_size for name in "qkv"}
    conv = ConvWeight(parts if has_split_convs(stored) else {f"{prefix}.conv1d": s.channels}, s.taps)
    name = f"{prefix}.{'A' if c.converted else 'A_log'}"
    shape = checkpoint.shape(layer + name) if layer + name in stored else (s.heads,)
    shape = shape if np.prod(shape) == s.heads else (s.heads,)  # [heads], or with axes of 1
    rate = DecayRate(name, shape, s.key_dim, plain=c.converted)
    return {
        "delta_in": Linear({f"{prefix}.{part}_proj": s.key_size for part in "qkv"}, c.hidden),
        "delta_gates": gates({f"{prefix}.b_proj": s.heads}, c.hidden),
        "decay_up": Linear({f"{prefix}.f_proj": s.key_size}, c.hidden, keep=Keep.EIGHT_BITS),
        "gate_up_of_output": Linear({f"{prefix}.g_proj": s.value_size}, c.hidden),
        "out": Linear({f"{prefix}.o_proj": c.hidden}, s.value_size),
        **state_specs(s, conv, rate, Vector(prefix, s.key_size, "dt_bias"), f"{prefix}.o_norm"),
    }


@dataclass(frozen=True, slots=True)
class BailingHybridLayer(KimiLinearLayer):
    limit: float = 0.0
    shared_limit: float = 0.0


# -- forward -----------------------------------------------------------------------------------------------------------


def load(ops: OpSet, checkpoint: Checkpoint, config: BailingHybridConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, RENAMED)
    ignored = [*mtp_layers(config.layers, config.num_mtp_layers), *(["lm_head.weight"] if config.tied else [])]
    by_prefix = {f"model.layers.{layer}.": layer_specs(config, layer, checkpoint) for layer in range(config.layers)}
    top, layers = load_weights(ops, checkpoint, deepseek.top_specs(config), by_prefix, "|".join([UNUSED, *ignored]))
    loaded = [deepseek.new_layer(layer, BailingHybridLayer) for layer in layers]
    weights = DeepseekWeights(**top, layers=loaded, rope=ops.frequencies(*frequencies(config.rope, max_model_len)))
    bound = partial(kimi_linear.forward, config, weights, delta=delta_attention, feed_forward=feed_forward)
    return LoadedModel(config, bound, [top, *layers])


def delta_attention(c: BailingHybridConfig, layer: Any, number: int, ops: OpSet, x: Value, batch: Any) -> Value:
    decay, beta = ops.linear(x, layer.decay_up), ops.linear(x, layer.delta_gates)
    if c.decay_bound is None:
        decay = ops.decay(decay, layer.decay_bias, layer.decay_rate)
    else:
        decay = ops.bounded_decay(decay, layer.decay_bias, layer.decay_rate, c.decay_bound)
    attended = attend(c.delta, layer, number, ops, ops.linear(x, layer.delta_in), decay, beta, batch)
    gate = ops.linear(x, layer.gate_up_of_output)
    return ops.linear(gated_norm(c.delta, ops, attended, gate, layer.delta_norm, c.eps), layer.out)


def feed_forward(c: BailingHybridConfig, layer: Any, ops: OpSet, x: Value) -> Value:
    if not layer.limit and not layer.shared_limit:
        return deepseek.feed_forward(c, layer, ops, x)
    m, routing = layer.moe, replace(c.routing, limit=layer.limit)
    logits = ops.linear(x, m.router)
    routed = ops.moe(x, logits, m.experts_up, m.experts_down, routing, Activation.SILU, m.correction)
    if layer.mlp is None:
        return routed
    inner = clamped(ops, ops.linear(x, layer.mlp.gate_up), c.shared_size, layer.shared_limit)
    return ops.add(routed, ops.linear(inner, layer.mlp.down))

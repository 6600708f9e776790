"""OLMo Hybrid: OLMo 2's attention in every fourth layer, and gated delta nets in the others.

Layers with attention norm what attention and feed-forward layer give; layers with a delta net norm what these get."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from quire.models import llama, moe
from quire.models.config import ATTENTION
from quire.models.delta_net import (
    LINEAR,
    ConvWeight,
    DecayRate,
    DeltaLayer,
    DeltaShape,
    delta_net,
    gates,
    hybrid_fields,
    layer_kinds,
    read_shape,
    state_specs,
)
from quire.models.llama import LlamaConfig
from quire.models.llama_families import POST_NORMS, PRE_NORMS, LlamaFamily, translate
from quire.models.loading import Linear, LoadedModel, TensorSpecs, Vector
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = LlamaFamily(qk_norms="rows")
DELTA_EPS = 1e-5  # of the norm of a delta net's output: no configuration has it
# The norms of a layer with a delta net are called otherwise in published checkpoints.
PUBLISHED_NORMS = {"attn_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoHybridConfig(LlamaConfig):
    delta: DeltaShape

    @property
    def delta_eps(self) -> float:
        return DELTA_EPS


def config(hf: CheckpointConfig) -> OlmoHybridConfig:
    layers, heads = hf.int("num_hidden_layers"), hf.int("num_attention_heads")
    default = [ATTENTION if layer % 4 == 3 else LINEAR for layer in range(layers)]
    if ATTENTION not in default:
        default[-1:] = [ATTENTION]
    kinds = layer_kinds(hf, layers, default)
    key_heads = hf.int("linear_num_key_heads", heads)
    key_dim = hf.int("linear_key_head_dim", int(0.75 * hf.int("hidden_size") / max(key_heads, 1)))
    hf = translate(hf, FAMILY).with_values(
        {
            "layer_types": None,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": hf.int("linear_num_value_heads", heads),
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": hf.int("linear_value_head_dim", 2 * key_dim),
        }
    )
    shape = read_shape(hf, max_beta=2.0 if hf.bool("linear_allow_neg_eigval", True) else 1.0)
    fields = llama.config_fields(hf, FAMILY) | {"rotated": (_has_rope(hf),) * layers}
    return OlmoHybridConfig(**hybrid_fields(fields, kinds, shape))


def _has_rope(hf: CheckpointConfig) -> bool:
    """Published checkpoints have none."""
    return "rope_theta" in hf or (hf.get("rope_parameters") or {}).get("rope_theta") is not None


def layer_specs(c: OlmoHybridConfig, stored: Collection[str]) -> list[TensorSpecs]:
    specs = llama.layer_specs(c)
    mlp = {name: specs[name] for name in ("gate_up", "down")}
    attention = {name: specs[name] for name in ("qkv", "q_norm", "k_norm", "out")}
    published = any(name.endswith("attention_layer_norm.weight") for name in stored)
    delta_norms = PUBLISHED_NORMS if published else PRE_NORMS
    delta = delta_specs(c, any(".q_conv1d." in name for name in stored))
    return [
        {**norm_specs(c, POST_NORMS), **attention, **mlp}
        if kind == ATTENTION
        else {**norm_specs(c, delta_norms), **delta, **mlp}
        for kind in c.kinds
    ]


def norm_specs(c: OlmoHybridConfig, norms: Any) -> TensorSpecs:
    return {ours: Vector(name, c.hidden) for ours, name in norms.items()}


def delta_specs(c: OlmoHybridConfig, split_conv: bool) -> TensorSpecs:
    s, prefix = c.delta, "linear_attn"
    sizes = {"q": s.key_size, "k": s.key_size, "v": s.value_size}
    parts = {f"{prefix}.{name}_conv1d": size for name, size in sizes.items()}
    conv = ConvWeight(parts if split_conv else {f"{prefix}.conv1d": s.channels}, s.taps)
    qkvg = {f"{prefix}.{name}_proj": size for name, size in {**sizes, "g": s.value_size}.items()}
    return {
        "delta_in": Linear(qkvg, c.hidden),
        "delta_gates": gates({f"{prefix}.b_proj": s.heads, f"{prefix}.a_proj": s.heads}, c.hidden),
        "out": Linear({f"{prefix}.o_proj": c.hidden}, s.value_size),
        **state_specs(
            s,
            conv,
            DecayRate(f"{prefix}.A_log", (s.heads,)),
            Vector(prefix, s.heads, "dt_bias"),
            f"{prefix}.o_norm",
        ),
    }


def load(ops: OpSet, checkpoint: Checkpoint, config: OlmoHybridConfig, max_model_len: int) -> LoadedModel:
    layers = layer_specs(config, checkpoint.names())
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, DeltaLayer, moe.feed_forward, mixer=mixer)


def mixer(c: Any, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    number = c.index_of_kind(index)
    if layer.delta_in is not None:
        return delta_net(c, layer, number, ops, x, batch)
    return llama.attention(c, layer, number, ops, x, angles, batch)

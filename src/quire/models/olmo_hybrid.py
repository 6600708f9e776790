"""OLMo Hybrid: OLMo 2's attention in every fourth layer, and gated delta nets in the others.

Layers with attention norm what attention and feed-forward layer give; layers with a delta net norm what these get."""

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
# What checkpoints may call norms: those of layers with a delta net as published, and all as transformers saves them.
OTHER_NAMES = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


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


def layer_specs(c: OlmoHybridConfig, checkpoint: Checkpoint) -> list[TensorSpecs]:
    return [layer_spec(c, checkpoint, f"model.layers.{index}.", kind) for index, kind in enumerate(c.kinds)]


def layer_spec(c: OlmoHybridConfig, checkpoint: Checkpoint, prefix: str, kind: str) -> TensorSpecs:
    specs, stored = llama.layer_specs(c), checkpoint.names()
    mlp = {name: specs[name] for name in ("gate_up", "down")}
    norms = POST_NORMS if kind == ATTENTION else PRE_NORMS
    names = {
        ours: name if f"{prefix}{name}.weight" in stored else OTHER_NAMES.get(name, name)
        for ours, name in norms.items()
    }
    if kind == LINEAR:
        mixer = delta_specs(c, stored_convs(c, checkpoint, prefix))
    else:
        mixer = {name: specs[name] for name in ("qkv", "q_norm", "k_norm", "out")}
    return {**{ours: Vector(name, c.hidden) for ours, name in names.items()}, **mixer, **mlp}


def stored_convs(c: OlmoHybridConfig, checkpoint: Checkpoint, prefix: str) -> dict[str, int]:
    """The convolutions of a layer, and their channels: of q, k and v, as published; transformers cuts them in three
    equal parts."""
    s, names = c.delta, [f"linear_attn.{part}_conv1d" for part in "qkv"]
    stored = [name for name in names if f"{prefix}{name}.weight" in checkpoint.names()]
    if not stored:
        return {"linear_attn.conv1d": s.channels}
    thirds = [checkpoint.shape(f"{prefix}{name}.weight")[0] for name in stored]
    sizes = (s.key_size, s.key_size, s.value_size)
    return dict(zip(names, thirds[:1] * 3 if 3 * thirds[0] == s.channels else sizes, strict=True))


def delta_specs(c: OlmoHybridConfig, convs: dict[str, int]) -> TensorSpecs:
    s, prefix = c.delta, "linear_attn"
    sizes = {"q": s.key_size, "k": s.key_size, "v": s.value_size}
    conv = ConvWeight(convs, s.taps)
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
    layers = layer_specs(config, checkpoint)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, DeltaLayer, moe.feed_forward, mixer=mixer)


def mixer(c: Any, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    if layer.delta_in is not None:
        return delta_net(c, layer, c.index_of_kind(index), ops, x, batch)
    return llama.attention(c, layer, index, ops, x, angles, batch)

"""Step 3.5: MoE whose layers with a window have more query heads; heads are gated, and activations of some layers are
clamped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, moe
from quire.models.deepseek import mtp_layers
from quire.models.gating import head_gate
from quire.models.layer_patterns import experts_as_listed
from quire.models.llama_families import translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import QWEN_EXPERTS, ExpertNames, MoeFamily
from quire.models.routing import grouped_sigmoid
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

SLIDING = "sliding_attention"
LEAST_SILU = 0.2785  # silu(x) is above -LEAST_SILU: a clamp from below does nothing
FIRST_SPARSE = 3  # layer with experts, where config.json does not say


def llama_keys(hf: CheckpointConfig) -> CheckpointConfig:
    """Lists of a value for each layer, with those of layers that predict further tokens behind them, as one value for
    each kind of layer."""
    layers = hf.int("num_hidden_layers")
    kinds = hf.list("layer_types", ["full_attention"] * layers)[:layers]
    values: dict[str, Any] = {"layer_types": kinds, "routed_scaling_factor": hf.float("moe_router_scaling_factor", 1.0)}
    if "mlp_layer_types" not in hf:
        listed = hf.get("moe_layers_enum", list(range(FIRST_SPARSE, layers)))
        numbers = listed.split(",") if isinstance(listed, str) else listed
        sparse = {int(number) for number in numbers}
        values["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(layers)]
    local = kinds.index(SLIDING) if SLIDING in kinds else 0
    full = next((layer for layer, kind in enumerate(kinds) if kind != SLIDING), 0)
    for key, listed_key, local_key in (
        ("rope_theta", "rope_theta", "rope_local_base_freq"),
        ("partial_rotary_factor", "partial_rotary_factors", "rope_local_partial_rotary_factor"),
    ):
        if isinstance(listed := hf.get(listed_key), list) and len(listed) >= layers > 0:
            values |= {key: listed[full], local_key: listed[local]}
    return hf.with_values(values)


FAMILY = MoeFamily(
    keys={
        "num_key_value_heads": "num_attention_groups",
        "num_local_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "shared_expert_intermediate_size": "share_expert_dim",
        "norm_topk_prob": "norm_expert_weight",
    },
    defaults={"hidden_act": "silu"},
    expects={
        "zero_centered": (True, None),
        "use_qk_norm": (True, None),
        "use_head_wise_attn_gate": (True, None),
        "moe_router_activation": ("sigmoid", None),
        "use_moe_router_bias": (True, None),
        "rope_local_scaling": (None,),
    },
    adapt=llama_keys,
    local_rope=True,
    spare_rope_factors=True,
    qk_norms="heads",
    norm_offset=1.0,
    routing=grouped_sigmoid,
    sparse=experts_as_listed,
    experts=(
        ExpertNames("moe.gate", ("moe.gate_proj.weight", "moe.up_proj.weight"), "moe.down_proj.weight"),
        replace(QWEN_EXPERTS, router="moe.gate"),
    ),
    correction="moe",
    correction_name="router_bias",
    shared="share_expert",
    shared_gate=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step3p5Config(MoeConfig):
    """`heads` is the number in layers that see all positions."""

    query_heads: tuple[int, ...]  # of each layer
    limits: tuple[float, ...]  # of activations of experts, in each layer; 0: none
    shared_limits: tuple[float, ...]  # of the shared experts, and of layers without experts

    def of_layer(self, layer: int) -> "Step3p5Config":
        return replace(self, heads=self.query_heads[layer])


def config(hf: CheckpointConfig) -> Step3p5Config:
    translated = translate(hf, FAMILY)
    if "n_routed_experts" in hf and "num_local_experts" not in translated:
        translated = translated.with_values({"num_local_experts": hf.int("n_routed_experts")})
    translated = translated.with_values({"n_routed_experts": translated.int("num_local_experts")})
    fields = moe.config_fields(translated, FAMILY)
    layers, heads = fields["layers"], fields["heads"]
    scalar = hf.float("query_pre_attn_scalar", float(fields["head_dim"]))
    return Step3p5Config(
        **fields | {"score_scale": scalar**-0.5},
        query_heads=tuple(_local_heads(hf, fields) if window else heads for window in fields["windows"]),
        limits=read_limits(hf, "swiglu_limits", layers),
        shared_limits=read_limits(hf, "swiglu_limits_shared", layers),
    )


def _local_heads(hf: CheckpointConfig, fields: dict[str, Any]) -> int:
    """Query heads of layers with a window, whose other sizes are those of all layers."""
    other = hf.section("attention_other_setting")
    heads = hf.int("num_sliding_attention_heads", other.int("num_attention_heads", fields["heads"]))
    kv_heads = other.int("num_attention_groups", fields["kv_heads"])
    if heads < 1 or heads % fields["kv_heads"]:
        raise BadCheckpoint(f"{heads} query heads cannot share {fields['kv_heads']} key heads evenly")
    if (kv_heads, other.int("head_dim", fields["head_dim"])) != (fields["kv_heads"], fields["head_dim"]):
        raise Unsupported(
            f"{hf.source}: attention_other_setting gives windowed layers {kv_heads} key heads, or other sizes, and "
            f"the others have {fields['kv_heads']} of {fields['head_dim']}"
        )
    return heads


def read_limits(hf: CheckpointConfig, key: str, layers: int) -> tuple[float, ...]:
    listed = [float(limit or 0) for limit in hf.list(key, [0] * layers)[:layers]]
    if len(listed) != layers or any(0 < limit < LEAST_SILU or limit < 0 for limit in listed):
        raise BadCheckpoint(f"{key} is {listed}: it needs a limit for each of {layers} layers, 0 or above {LEAST_SILU}")
    return tuple(listed)


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of one layer, as a weight that no checkpoint stores."""

    value: float

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Step3p5Layer(MoeLayer):
    limit: float = 0.0
    shared_limit: float = 0.0


def layer_specs(c: Step3p5Config, stored: set[str]) -> list[TensorSpecs]:
    specs: list[TensorSpecs] = []
    for layer in range(c.layers):
        own = c.of_layer(layer)
        specs.append(
            {
                **moe.layer_specs(own, stored)[layer],
                "gate": head_gate("self_attn.g_proj", own.heads, c.head_dim, c.hidden),
                "limit": Limit(c.limits[layer]),
                "shared_limit": Limit(c.shared_limits[layer]),
            }
        )
    return specs


def load(ops: OpSet, checkpoint: Checkpoint, config: Step3p5Config, max_model_len: int) -> LoadedModel:
    layers, unused = layer_specs(config, set(checkpoint.names())), mtp_layers(config.layers, config.num_mtp_layers)
    return llama.load_layers(
        ops, checkpoint, config, max_model_len, layers, Step3p5Layer, feed_forward, unused, mixer=mixer
    )


def mixer(
    c: Step3p5Config, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    return llama.attention(c.of_layer(index), layer, index, ops, x, angles, batch)


def feed_forward(c: Step3p5Config, layer: Step3p5Layer, ops: OpSet, x: Value) -> Value:
    size = c.intermediate if layer.router is None else c.shared_size
    inner = clamped(ops, ops.linear(x, layer.gate_up), size, layer.shared_limit)
    shared = ops.linear(inner, layer.down)
    if layer.router is None:
        return shared
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    experts, routing = (layer.experts_gate_up, layer.experts_down), replace(c.routing, limit=layer.limit)
    routed = ops.moe(x, ops.linear(x, layer.router), *experts, routing, Activation.SILU, layer.correction)
    return ops.add(routed, shared)


def clamped(ops: OpSet, gate_up: Value, size: int, limit: float) -> Value:
    """gate_up [T, 2 * size] -> silu(gate) * up, both clamped."""
    if not limit:
        return ops.activate_and_mul(gate_up, Activation.SILU)
    gate, up = ops.split(gate_up, (size, size))
    return ops.mul(ops.clamp(ops.activate(gate, Activation.SILU), limit), ops.clamp(up, limit))

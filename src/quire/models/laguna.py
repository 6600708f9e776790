"""Laguna: MoE whose layers may differ in their query heads, and whose attention has a softplus gate, of each head or of
each column."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, moe
from quire.models.gating import head_gate
from quire.models.layer_patterns import experts_as_listed
from quire.models.llama_families import translate
from quire.models.loading import Linear, LoadedModel, TensorSpecs
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import MoeFamily
from quire.models.routing import grouped_sigmoid
from quire.ops.opset import Activation, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

GATE = "self_attn.g_proj"
GATES = {"per-head": True, "per_head": True, "per-element": False, "per_element": False, True: True}


def llama_keys(hf: CheckpointConfig) -> CheckpointConfig:
    layers = hf.int("num_hidden_layers")
    if "rope_theta" not in hf:
        hf = hf.with_values({"rope_theta": 500_000.0, "partial_rotary_factor": 0.5, "rope_local_base_freq": 10_000.0})
    kinds = hf.list("layer_types", ["full_attention"] * layers)
    return hf.with_values({"layer_types": kinds, "n_routed_experts": hf.int("num_experts")})


FAMILY = MoeFamily(
    keys={"routed_scaling_factor": "moe_routed_scaling_factor"},
    defaults={"head_dim": 128, "first_k_dense_replace": 1, "num_experts": 256},
    expects={
        "moe_apply_router_weight_on_input": (False, None),
        "norm_topk_prob": (True, None),
        "rope_local_scaling": (None,),
    },
    adapt=llama_keys,
    default_window=512,
    local_rope=True,
    qk_norms="heads",
    gate_activation=Activation.SOFTPLUS,
    routing=grouped_sigmoid,
    sparse=experts_as_listed,
    correction="mlp.experts",
    shared_gate=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaConfig(MoeConfig):
    query_heads: tuple[int, ...]  # of each layer
    gated_heads: bool | None  # the gate has a number for each head, or for each column; None: as it is stored

    def of_layer(self, layer: int) -> "LagunaConfig":
        return replace(self, heads=self.query_heads[layer])


def config(hf: CheckpointConfig) -> LagunaConfig:
    fields = moe.config_fields(translate(hf, FAMILY), FAMILY)
    return LagunaConfig(
        **fields | {"router_cap": hf.float("moe_router_logit_softcapping", 0.0)},
        query_heads=_query_heads(hf, fields),
        gated_heads=None if "converted" in hf else _gated_heads(hf, fields["layers"]),
    )


def _query_heads(hf: CheckpointConfig, fields: dict[str, Any]) -> tuple[int, ...]:
    layers, kv_heads = fields["layers"], fields["kv_heads"]
    heads = hf.list("num_attention_heads_per_layer", [fields["heads"]] * layers)
    if len(heads) != layers:
        raise BadCheckpoint(f"num_attention_heads_per_layer lists {len(heads)} layers, and there are {layers}")
    if wrong := [count for count in heads if type(count) is not int or count < 1 or count % kv_heads]:
        raise BadCheckpoint(f"{wrong[0]} query heads cannot share {kv_heads} key heads evenly")
    return tuple(heads)


def _gated_heads(hf: CheckpointConfig, layers: int) -> bool:
    kinds: Sequence[Any] = hf.list("gating_types", []) or [hf.get("gating", True)]
    if unknown := [kind for kind in kinds if kind not in GATES]:
        raise Unsupported(f"{hf.source}: gating is {unknown[0]!r}", "supported: per-head and per-element")
    if len({GATES[kind] for kind in kinds}) != 1:
        raise Unsupported(f"{hf.source}: gating_types lists gates per head and per element", "one kind is supported")
    return GATES[kinds[0]]


def layer_specs(c: LagunaConfig, checkpoint: Checkpoint) -> list[TensorSpecs]:
    specs: list[TensorSpecs] = []
    stored = set(checkpoint.names())
    for layer in range(c.layers):
        own = c.of_layer(layer)
        name = f"model.layers.{layer}.{GATE}.weight"
        by_head = c.gated_heads
        if by_head is None:
            by_head = name in stored and checkpoint.shape(name)[0] == own.heads
        by_column = Linear({GATE: own.q_size}, c.hidden)
        gate = head_gate(GATE, own.heads, c.head_dim, c.hidden) if by_head else by_column
        specs.append({**moe.layer_specs(own, stored, checkpoint.shape)[layer], "gate": gate})
    return specs


def load(ops: OpSet, checkpoint: Checkpoint, config: LagunaConfig, max_model_len: int) -> LoadedModel:
    layers = layer_specs(config, checkpoint)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, MoeLayer, moe.feed_forward, mixer=mixer)


def mixer(
    c: LagunaConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any
) -> Value:
    return llama.attention(c.of_layer(index), layer, index, ops, x, angles, batch)

"""Qwen3-Next: gated delta nets in three of four layers, attention with a gate in the others, and experts.

Norms are stored less 1, but for that of a delta net's output. Heads of attention rotate a quarter of their columns, and
are multiplied by the sigmoid of a gate that is computed beside the query."""

from collections.abc import Container
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models import llama, moe
from quire.models.config import ATTENTION
from quire.models.delta_net import (
    ConvWeight,
    DecayRate,
    DeltaLayer,
    DeltaShape,
    delta_net,
    gates,
    hybrid_fields,
    interval_kinds,
    read_shape,
    state_specs,
)
from quire.models.llama_families import translate
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpecs, Vector
from quire.models.moe import MoeConfig
from quire.models.moe_families import QWEN_EXPERTS, MoeFamily
from quire.ops.opset import Activation, OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def without_layer_types(hf: CheckpointConfig) -> CheckpointConfig:
    """`layer_types` names kinds of attention and of linear attention, and no windows."""
    return hf.with_values({"layer_types": None})


FAMILY = MoeFamily(
    defaults={**DEFAULTS, "norm_topk_prob": True},
    adapt=without_layer_types,
    qk_norms="heads",
    norm_offset=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(MoeConfig):
    delta: DeltaShape
    converted: bool = False  # tensors are those of GGUF files

    @property
    def delta_eps(self) -> float:
        return self.eps


def config(hf: CheckpointConfig) -> Qwen3NextConfig:
    adapted = translate(hf, FAMILY)
    fields = moe.config_fields(adapted, FAMILY)
    return Qwen3NextConfig(**delta_fields(hf, adapted, fields))


def delta_fields(hf: CheckpointConfig, adapted: CheckpointConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, with those of delta nets added."""
    shape = read_shape(adapted, tiled=hf.bool("tiled_heads", False))
    hybrid = hybrid_fields(fields, interval_kinds(hf, fields["layers"]), shape)
    return hybrid | {"converted": hf.bool("converted", False)}


# -- tensors -----------------------------------------------------------------------------------------------------------


def layer_specs(c: Qwen3NextConfig, stored: Container[str]) -> list[TensorSpecs]:
    experts = moe.expert_specs(c, QWEN_EXPERTS)
    dense = {name: spec for name, spec in llama.layer_specs(c).items() if name in ("gate_up", "down")}
    mixers = mixer_specs(c, stored)
    return [
        {**norm_specs(c), **mixers[kind], **(experts if sparse else dense)}
        for kind, sparse in zip(c.kinds, c.sparse, strict=True)
    ]


def mixer_specs(c: Any, stored: Container[str]) -> dict[str, TensorSpecs]:
    """The tensors that mix tokens, by kind of layer."""
    return {kind: attention_specs(c) if kind == ATTENTION else delta_specs(c, stored) for kind in set(c.kinds)}


def norm_specs(c: Any) -> TensorSpecs:
    return {name: spec for name, spec in llama.layer_specs(c).items() if name in ("attn_norm", "mlp_norm")}


def attention_specs(c: Any) -> TensorSpecs:
    """q_proj has, for each head, its query and then its gate."""
    specs = {name: llama.layer_specs(c)[name] for name in ("q_norm", "k_norm", "out")}
    parts = {
        "self_attn.q_proj": LinearPart(2 * c.q_size, queries_then_gates(c.heads, c.head_dim)),
        "self_attn.k_proj": c.kv_size,
        "self_attn.v_proj": c.kv_size,
    }
    return {**specs, "qkv": Linear(parts, c.hidden, bias=c.qkv_bias)}


def queries_then_gates(heads: int, head_dim: int) -> NDArray[np.int32]:
    rows = np.arange(2 * heads * head_dim, dtype=np.int32).reshape(heads, 2, head_dim)
    return np.concatenate([rows[:, 0].ravel(), rows[:, 1].ravel()])


def delta_specs(c: Any, stored: Container[str]) -> TensorSpecs:
    s, prefix = c.delta, "linear_attn"
    qkvz: dict[str, Any] = {f"{prefix}.in_proj_qkv": s.channels, f"{prefix}.in_proj_z": s.value_size}
    ba: dict[str, Any] = {f"{prefix}.in_proj_b": s.heads, f"{prefix}.in_proj_a": s.heads}
    if _has(stored, f"{prefix}.in_proj_qkvz"):
        sizes = (s.key_dim, s.key_dim, _shared(s) * s.value_dim, _shared(s) * s.value_dim)
        qkvz = {f"{prefix}.in_proj_qkvz": LinearPart(s.channels + s.value_size, ungrouped(s, sizes))}
    if _has(stored, f"{prefix}.in_proj_ba"):
        ba = {f"{prefix}.in_proj_ba": LinearPart(2 * s.heads, ungrouped(s, (_shared(s), _shared(s))))}
    conv = ConvWeight({f"{prefix}.conv1d": s.channels}, s.taps, c.converted)
    rates, biases = DecayRate(f"{prefix}.A_log", (s.heads,)), Vector(prefix, s.heads, "dt_bias")
    if c.converted:
        rates, biases = DecayRate(f"{prefix}.A", (s.heads,), negated=True), Vector(f"{prefix}.dt", s.heads, "bias")
    return {
        "delta_in": Linear(qkvz, c.hidden),
        "delta_gates": gates(ba, c.hidden),
        "out": Linear({f"{prefix}.out_proj": c.hidden}, s.value_size),
        **state_specs(s, conv, rates, biases, f"{prefix}.norm"),
    }


def _has(stored: Container[str], name: str) -> bool:
    """Whether delta nets have the linear layer. The first layer may have attention."""
    return any(f"model.layers.{layer}.{name}.weight" in stored for layer in (0, 1))


def _shared(s: DeltaShape) -> int:
    """Heads that share a key head."""
    return s.heads // s.key_heads


def ungrouped(s: DeltaShape, sizes: tuple[int, ...]) -> NDArray[np.int32]:
    """For a tensor that has parts of these sizes for each key head: the first part of all, then the second, ..."""
    rows = np.arange(s.key_heads * sum(sizes), dtype=np.int32).reshape(s.key_heads, sum(sizes))
    return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])


# -- forward -----------------------------------------------------------------------------------------------------------


def load(ops: OpSet, checkpoint: Checkpoint, config: Qwen3NextConfig, max_model_len: int) -> LoadedModel:
    return load_layers(ops, checkpoint, config, max_model_len, layer_specs(config, set(checkpoint.names())))


def load_layers(
    ops: OpSet, checkpoint: Checkpoint, config: Any, max_model_len: int, layers: list[TensorSpecs]
) -> LoadedModel:
    return llama.load_layers(
        ops,
        checkpoint,
        config,
        max_model_len,
        layers,
        DeltaLayer,
        moe.feed_forward,
        mixer=mixer,
    )


def mixer(c: Any, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    number = c.index_of_kind(index)
    if layer.delta_in is not None:
        return delta_net(c, layer, number, ops, x, batch)
    q, gate, k, v = ops.split(ops.linear(x, layer.qkv), (c.q_size, c.q_size, c.kv_size, c.kv_size))
    q, k = ops.rms_norm(q, layer.q_norm, c.eps), ops.rms_norm(k, layer.k_norm, c.eps)
    ops.write_kv(ops.rope(k, angles, c.head_dim), v, batch, number)
    q = ops.rope(q, angles, c.head_dim)
    attended = ops.paged_attention(q, batch, number, c.head_dim, 1 / sqrt(c.head_dim))
    return ops.linear(ops.mul(attended, ops.activate(gate, Activation.SIGMOID)), layer.out)

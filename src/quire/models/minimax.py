"""MiniMax-01 and M1: lightning attention in seven of eight layers, attention in the others, and experts.

Lightning attention adds k v^T to the state of a head, which decays by a factor that the head and its layer determine.
What is added to the output of a layer is its normed input, each times a factor (`alpha` and `beta`)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.models import llama, moe
from quire.models.config import ATTENTION
from quire.models.delta_net import LINEAR, layer_kinds
from quire.models.llama import LlamaWeights
from quire.models.llama_families import translate
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import MIXTRAL_EXPERTS, MoeFamily
from quire.models.rope import frequencies
from quire.ops.kv_spec import StateSpec
from quire.ops.opset import Activation, OpSet, Value
from quire.ops.tensors import stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

LIGHTNING_EPS = 1e-6  # of the norm of lightning attention's output: no configuration has it
BUFFERS = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"  # computed here
MIXERS = {ATTENTION: "full", LINEAR: "linear"}
# Keys of transformers -> of MiniMax-Text-01 and M1 as published.
PUBLISHED = {
    f"{kind}_attn_{factor}_factor": f"layernorm_{kind}_attention_{factor}"
    for kind in MIXERS.values()
    for factor in ("alpha", "beta")
} | {f"mlp_{factor}_factor": f"layernorm_mlp_{factor}" for factor in ("alpha", "beta")}


def without_layer_types(hf: CheckpointConfig) -> CheckpointConfig:
    return hf.with_values({"layer_types": None})


FAMILY = MoeFamily(
    keys=PUBLISHED,
    defaults={"norm_topk_prob": True, "rope_theta": 1_000_000.0},
    expects={"postnorm": (True, None), "shared_intermediate_size": (0, None), "sliding_window": (None,)},
    adapt=without_layer_types,
    experts=(MIXTRAL_EXPERTS,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxConfig(MoeConfig):
    mixer_scales: tuple[tuple[float, float], ...]  # for each layer: alpha and beta
    mlp_scales: tuple[float, float]


def config(hf: CheckpointConfig) -> MiniMaxConfig:
    adapted = translate(hf, FAMILY)
    fields = moe.config_fields(adapted, FAMILY)
    kinds = layer_kinds(hf, fields["layers"], _default_kinds(hf, fields["layers"]))
    scales = {kind: _scales(adapted, f"{name}_attn") for kind, name in MIXERS.items()}
    shape = (fields["heads"], fields["head_dim"], fields["head_dim"])
    return MiniMaxConfig(
        **fields,
        kinds=kinds,
        states=StateSpec(kinds.count(LINEAR), shape) if LINEAR in kinds else None,
        mixer_scales=tuple(scales[kind] for kind in kinds),
        mlp_scales=_scales(adapted, "mlp"),
    )


def _default_kinds(hf: CheckpointConfig, layers: int) -> list[str]:
    """The kind of every layer, by `attn_type_list`, as published; without it, attention in every second layer."""
    listed = hf.list("attn_type_list", [(layer + 1) % 2 for layer in range(layers)])
    if unknown := [kind for kind in listed if kind not in (0, 1)]:
        raise BadCheckpoint(f"attn_type_list has {unknown[0]!r}, and not 0 or 1")
    return [ATTENTION if kind else LINEAR for kind in listed]


def _scales(hf: CheckpointConfig, name: str) -> tuple[float, float]:
    return hf.float(f"{name}_alpha_factor", 1.0), hf.float(f"{name}_beta_factor", 1.0)


def decays(c: MiniMaxConfig, layer: int) -> NDArray[np.float32]:
    """The decay of each head of a layer: lower heads forget faster, and higher layers remember longer."""
    slopes = 0.5 ** (8 / c.heads * np.arange(1, c.heads + 1))
    kept: NDArray[np.float32] = np.exp(-slopes * (1 - layer / (c.layers - 1 + 1e-5) + 1e-5)).astype(np.float32)
    return kept


# -- tensors -----------------------------------------------------------------------------------------------------------


def layer_specs(c: MiniMaxConfig) -> list[TensorSpecs]:
    attention, experts = moe.attention_specs(c), moe.expert_specs(c, MIXTRAL_EXPERTS)
    norms = {name: attention[name] for name in ("attn_norm", "mlp_norm")}
    mixers = {ATTENTION: attention, LINEAR: {**norms, **lightning_specs(c)}}
    return [{**mixers[kind], **experts} for kind in c.kinds]


def lightning_specs(c: MiniMaxConfig) -> TensorSpecs:
    return {
        "qkv": Linear({"self_attn.qkv_proj": LinearPart(3 * c.q_size, ungrouped_heads(c))}, c.hidden),
        "output_gate": Linear({"self_attn.output_gate": c.q_size}, c.hidden),
        "output_norm": Vector("self_attn.norm", c.q_size),
        "out": Linear({"self_attn.out_proj": c.hidden}, c.q_size),
    }


def ungrouped_heads(c: MiniMaxConfig) -> NDArray[np.int32]:
    """For a tensor that has q, k and v of each head side by side."""
    rows = np.arange(3 * c.q_size, dtype=np.int32).reshape(c.heads, 3, c.head_dim)
    return np.concatenate([rows[:, part].ravel() for part in range(3)])


@dataclass(frozen=True, slots=True)
class MiniMaxLayer(MoeLayer):
    """With attention, or with lightning attention, in which `decay` is given."""

    output_gate: Any = None
    output_norm: Any = None
    decay: Any = None


# -- forward -----------------------------------------------------------------------------------------------------------


def load(ops: OpSet, checkpoint: Checkpoint, config: MiniMaxConfig, max_model_len: int) -> LoadedModel:
    by_prefix = {f"model.layers.{index}.": specs for index, specs in enumerate(layer_specs(config))}
    unused = "|".join([llama.UNUSED, BUFFERS, *(["lm_head.weight"] if config.tied else [])])
    top, loaded = load_weights(ops, checkpoint, llama.top_specs(config), by_prefix, unused)
    layers = []
    for index, layer in enumerate(loaded):
        is_linear = config.kinds[index] == LINEAR
        decay = ops.vector(stored_floats("decay", decays(config, index))) if is_linear else None
        layers.append(MiniMaxLayer(**layer, decay=decay))
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = LlamaWeights(**top, layers=layers, rope=rope)
    return LoadedModel(config, partial(forward, config, weights), [top, *loaded])


def forward(c: MiniMaxConfig, w: LlamaWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.layers):
        ops.tap(x, index)
        x = ops.rms_norm(x, layer.attn_norm, c.eps)
        x = added(ops, x, mixer(c, layer, index, ops, x, angles, batch), c.mixer_scales[index])
        x = ops.rms_norm(x, layer.mlp_norm, c.eps)
        x = added(ops, x, moe.feed_forward(c, layer, ops, x), c.mlp_scales)
    ops.tap(x, c.layers)
    x = ops.rms_norm(x, w.norm, c.eps)
    ops.tap(x, c.layers + 1)
    return ops.logits(x, w.head, batch)


def added(ops: OpSet, x: Value, h: Value, scales: tuple[float, float]) -> Value:
    alpha, beta = scales
    return ops.add(llama.scaled(ops, x, alpha), llama.scaled(ops, h, beta))


def mixer(c: MiniMaxConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    if layer.decay is None:
        return llama.attention(c, layer, index, ops, x, angles, batch)
    qkv = ops.activate(ops.linear(x, layer.qkv), Activation.SILU)
    q, k, v = ops.split(qkv, (c.q_size,) * 3)
    attended = ops.linear_attention(q, k, v, layer.decay, batch, c.index_of_kind(index), c.head_dim)
    gate = ops.activate(ops.linear(x, layer.output_gate), Activation.SIGMOID)
    return ops.linear(ops.mul(ops.rms_norm(attended, layer.output_norm, LIGHTNING_EPS), gate), layer.out)

"""The layer that predicts further tokens in checkpoints of Qwen3-Next and Qwen3.5 (`mtp.*`), as a head.

It is a layer with attention, also where most of the target's layers are delta nets. Its last norm is part of the hidden
state that the next draft reads. It shares the target's embedding and LM head."""

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.models import llama, moe, qwen3_5, qwen3_next
from quire.models.config import ATTENTION, ModelConfig
from quire.models.delta_net import DeltaLayer
from quire.models.draft_head import DraftHead, first_tap
from quire.models.loading import Linear, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.moe import MoeConfig
from quire.models.moe_families import QWEN_EXPERTS
from quire.models.rope import frequencies
from quire.ops.opset import OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.checkpoint import Checkpoint

QwenConfig = qwen3_next.Qwen3NextConfig | qwen3_5.Qwen35Config
LAYER = "mtp.layers.0."


def has_layer(checkpoint: Checkpoint, target: ModelConfig) -> bool:
    return isinstance(target, QwenConfig) and _has(checkpoint, "mtp.fc.weight")


def _has(checkpoint: Checkpoint, name: str) -> bool:
    """(Without names it is a DummyCheckpoint, which has every tensor.)"""
    names = checkpoint.names()
    return not names or name in names


def config(checkpoint: Checkpoint, target: QwenConfig) -> QwenConfig:
    """The configuration of the target, with one layer, which has attention."""
    shared: dict[str, Any] = {"layers": 1, "kinds": (ATTENTION,), "states": None, "windows": (0,), "rotated": (True,)}
    if not isinstance(target, MoeConfig):
        return replace(target, **shared)
    return replace(target, **shared, sparse=(_has(checkpoint, f"{LAYER}mlp.gate.weight"),))


def head_specs(c: QwenConfig) -> TensorSpecs:
    norms = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
    specs = {ours: Vector(f"mtp.{name}", c.hidden, offset=c.family.norm_offset) for ours, name in norms.items()}
    return {**specs, "fc": Linear({"mtp.fc": c.hidden}, 2 * c.hidden)}


def layer_specs(c: QwenConfig, stored: Container[str]) -> TensorSpecs:
    specs = {**qwen3_next.norm_specs(c), **qwen3_next.attention_specs(c)}
    if isinstance(c, MoeConfig) and c.sparse[0]:
        stacked = LAYER + qwen3_5.STACKED_EXPERTS.down in stored
        return {**specs, **moe.expert_specs(c, qwen3_5.STACKED_EXPERTS if stacked else QWEN_EXPERTS)}
    return specs | {name: spec for name, spec in llama.layer_specs(c).items() if name in ("gate_up", "down")}


@dataclass(frozen=True, slots=True)
class QwenMtpWeights:
    embed_norm: Any
    hidden_norm: Any
    fc: PackedWeight
    norm: Any
    layer: DeltaLayer
    embed: Any
    head: PackedWeight
    rope: Any


def load(ops: OpSet, checkpoint: Checkpoint, config: QwenConfig, target: LoadedModel, max_model_len: int) -> DraftHead:
    specs = layer_specs(config, set(checkpoint.names()))
    top, (layer,) = load_weights(ops, checkpoint, head_specs(config), {LAYER: specs}, ".*")
    shared = {"embed": target.weight("embed"), "head": target.weight("head")}
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = QwenMtpWeights(**top, **shared, layer=DeltaLayer(**layer), rope=rope)
    taps = (target.config.layers + 1,)
    return DraftHead(config, config.hidden, taps, first_tap, [partial(forward, config, weights)], [top, layer])


def forward(c: QwenConfig, w: QwenMtpWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    embeds = ops.rms_norm(ops.embedding(batch.ids, w.embed), w.embed_norm, c.eps)
    x = ops.linear(ops.concat([embeds, ops.rms_norm(ops.hidden_states(batch), w.hidden_norm, c.eps)]), w.fc)
    h = qwen3_next.mixer(c, w.layer, 0, ops, ops.rms_norm(x, w.layer.attn_norm, c.eps), angles, batch, None)
    x = ops.add(x, h)
    feed_forward: Any = moe.feed_forward  # which is the MLP where the layer has no experts
    x = ops.add(x, feed_forward(c, w.layer, ops, ops.rms_norm(x, w.layer.mlp_norm, c.eps)))
    x = ops.rms_norm(x, w.norm, c.eps)
    ops.keep(x, batch)
    return ops.logits(x, w.head, batch)

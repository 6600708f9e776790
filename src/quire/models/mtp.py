"""Multi-token prediction: the layer behind the last that DeepSeek-V3 and GLM-4.5 checkpoints carry, as a head. That of
Qwen3-Next and Qwen3.5 is in qwen_mtp.py.

It reads the target's last hidden state beside the embedding of the token that follows (enorm, hnorm, eh_proj), and
shares the target's embedding and LM head. Where there are several such layers, the first drafts all tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.core.errors import Unsupported
from quire.models import deepseek, llama, moe, qwen_mtp
from quire.models.config import ModelConfig
from quire.models.deepseek import DeepseekConfig
from quire.models.draft_head import DraftHead, first_tap
from quire.models.indexer import Choice
from quire.models.loading import Linear, LoadedModel, TensorSpecs, Vector, load_weights
from quire.models.moe import MoeConfig
from quire.models.rope import frequencies
from quire.ops.opset import OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.checkpoint import Checkpoint

OTHERS = "draft with a head of its own: eagle3, medusa; or use ngram or suffix"
MtpConfig = DeepseekConfig | MoeConfig
Block = Callable[[OpSet, Value, Value, Any], Value]  # (ops, x, angles, batch)


def config(checkpoint: Checkpoint, target: ModelConfig) -> MtpConfig | qwen_mtp.QwenConfig:
    """The configuration of the target, with one layer."""
    if isinstance(target, qwen_mtp.QwenConfig) and qwen_mtp.has_layer(checkpoint, target):
        return qwen_mtp.config(checkpoint, target)
    if isinstance(target, qwen_mtp.QwenConfig) or not getattr(target, "num_mtp_layers", 0):
        raise Unsupported(
            f"{checkpoint.path.name} is a `{target.architecture}` without layers that predict further tokens "
            "(num_nextn_predict_layers)",
            OTHERS,
        )
    if type(target) not in (DeepseekConfig, MoeConfig) or not _is_stored(checkpoint, target):
        raise Unsupported(
            f"{checkpoint.path.name} is a `{target.architecture}` without a layer behind the last that predicts "
            "further tokens as those of DeepSeek-V3, GLM-4.5 and Qwen3-Next do",
            OTHERS,
        )
    assert isinstance(target, MtpConfig)
    if isinstance(target, DeepseekConfig):
        return replace(target, layers=1, windows=target.windows[-1:], num_dense=0 if target.num_experts > 1 else 1)
    rotated, sparse = target.rotated[-1:], target.sparse[-1:]
    return replace(target, layers=1, windows=target.windows[-1:], rotated=rotated, sparse=sparse)


def _is_stored(checkpoint: Checkpoint, target: ModelConfig) -> bool:
    """Whether there is such a layer as DeepSeek-V3 has it. (Without names it is a DummyCheckpoint.)"""
    stored = checkpoint.names()
    return not stored or f"model.layers.{target.layers}.shared_head.norm.weight" in stored


def head_specs(hidden: int) -> TensorSpecs:
    return {
        "enorm": Vector("enorm", hidden),
        "hnorm": Vector("hnorm", hidden),
        "eh_proj": Linear({"eh_proj": hidden}, 2 * hidden),
        "head_norm": Vector("shared_head.norm", hidden),
    }


@dataclass(frozen=True, slots=True)
class MtpWeights:
    enorm: Any  # of the embedding
    hnorm: Any  # of the hidden state
    eh_proj: PackedWeight
    head_norm: Any
    embed: Any
    head: PackedWeight
    rope: Any


def load(
    ops: OpSet,
    checkpoint: Checkpoint,
    config: MtpConfig | qwen_mtp.QwenConfig,
    target: LoadedModel,
    max_model_len: int,
) -> DraftHead:
    if isinstance(config, qwen_mtp.QwenConfig):
        return qwen_mtp.load(ops, checkpoint, config, target, max_model_len)
    prefix = f"model.layers.{target.config.layers}."
    names = {name.replace(prefix, "model.layers.0.") for name in checkpoint.names() if name.startswith(prefix)}
    own, layer = head_specs(config.hidden), _layer_specs(config, names)
    _, (loaded,) = load_weights(ops, checkpoint, {}, {prefix: {**own, **layer}}, ".*")
    shared = {"embed": target.weight("embed"), "head": target.weight("head")}
    rope = ops.frequencies(*frequencies(config.rope, max_model_len))
    weights = MtpWeights(**{name: loaded[name] for name in own}, **shared, rope=rope)
    block = _block(config, {name: loaded[name] for name in layer})
    taps = (target.config.layers + 1,)
    return DraftHead(config, config.hidden, taps, first_tap, [partial(forward, config.eps, weights, block)], [loaded])


def _layer_specs(c: MtpConfig, stored: set[str]) -> TensorSpecs:
    return deepseek.layer_specs(c, 0) if isinstance(c, DeepseekConfig) else moe.layer_specs(c, stored)[0]


def _block(c: MtpConfig, loaded: Mapping[str, Any]) -> Block:
    if isinstance(c, DeepseekConfig):
        return partial(_deepseek_block, c, deepseek.new_layer(loaded))
    return partial(_moe_block, c, moe.MoeLayer(**loaded))


def _deepseek_block(
    c: DeepseekConfig, layer: deepseek.DeepseekLayer, ops: OpSet, x: Value, angles: Value, batch: Any
) -> Value:
    return deepseek.block(c, layer, 0, ops, x, angles, batch, Choice())


def _moe_block(c: MoeConfig, layer: moe.MoeLayer, ops: OpSet, x: Value, angles: Value, batch: Any) -> Value:
    x = ops.add(x, llama.attention(c, layer, 0, ops, llama.normed(ops, x, layer.attn_norm, c.eps), angles, batch))
    return ops.add(x, moe.feed_forward(c, layer, ops, llama.normed(ops, x, layer.mlp_norm, c.eps)))


def forward(eps: float, w: MtpWeights, block: Block, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    embeds = ops.rms_norm(ops.embedding(batch.ids, w.embed), w.enorm, eps)
    hidden = ops.rms_norm(ops.hidden_states(batch), w.hnorm, eps)
    x = block(ops, ops.linear(ops.concat([embeds, hidden]), w.eh_proj), angles, batch)
    ops.keep(x, batch)
    return ops.logits(ops.rms_norm(x, w.head_norm, eps), w.head, batch)

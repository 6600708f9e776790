"""SmallThinker: MoE whose router reads the layer's input, before its attention, and whose experts have a ReLU."""

from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import llama, moe
from quire.models.llama import normed
from quire.models.llama_families import translate
from quire.models.loading import LoadedModel
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import ExpertNames, MoeFamily
from quire.models.routing import sigmoid_top_k, softmax_top_k
from quire.ops.opset import Activation, OpSet, Routing, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EXPERTS = ExpertNames(
    "block_sparse_moe.primary_router",
    ("block_sparse_moe.experts.{}.gate", "block_sparse_moe.experts.{}.up"),
    "block_sparse_moe.experts.{}.down",
)


def _layout(hf: CheckpointConfig, key: str, layers: int, default: int) -> list[bool]:
    """A flag for each layer."""
    flags = hf.list(key, [default] * layers)
    if len(flags) != layers:
        raise BadCheckpoint(f"{hf.source}: {key} lists {len(flags)} layers, and there are {layers}")
    return [bool(flag) for flag in flags]


def windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    window = hf.int("sliding_window", 0)
    return tuple(window if local else 0 for local in _layout(hf, "sliding_window_layout", layers, 0))


def rotated(hf: CheckpointConfig, windows: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(_layout(hf, "rope_layout", len(windows), 1))


def routing(hf: CheckpointConfig) -> Routing:
    softmax = hf.bool("moe_primary_router_apply_softmax", False)
    return (softmax_top_k if softmax else sigmoid_top_k)(hf.with_values({"norm_topk_prob": True}))


FAMILY = MoeFamily(
    keys={
        "num_local_experts": "moe_num_primary_experts",
        "num_experts_per_tok": "moe_num_active_primary_experts",
        "intermediate_size": "moe_ffn_hidden_size",
        "sliding_window": "sliding_window_size",
    },
    defaults={"hidden_act": "relu", "tie_word_embeddings": True},
    expects={
        "moe_enable_early_router": (True, None),
        "moe_enable_secondary_experts": (False, None),
        "moe_shared_primary_experts": (0, None),
        "use_qk_norm": (False, None),
    },
    activations={"relu": Activation.RELU},
    windows=windows,
    rotated=rotated,
    routing=routing,
    experts=(EXPERTS,),
)


def config(hf: CheckpointConfig) -> MoeConfig:
    return MoeConfig(**moe.config_fields(translate(hf, FAMILY), FAMILY))


def load(ops: OpSet, checkpoint: Checkpoint, config: MoeConfig, max_model_len: int) -> LoadedModel:
    layers = moe.layer_specs(config, set(checkpoint.names()))
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, MoeLayer, block=block)


def block(c: MoeConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    logits = moe.router_logits(c, layer, ops, x)
    x = ops.add(x, llama.attention(c, layer, index, ops, normed(ops, x, layer.attn_norm, c.eps), angles, batch))
    fed = normed(ops, x, layer.mlp_norm, c.eps)
    experts = (layer.experts_gate_up, layer.experts_down)
    return ops.add(x, ops.moe(fed, logits, *experts, c.routing, c.activation))

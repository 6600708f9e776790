"""Snowflake Arctic: Llama in which some layers have experts beside their feed-forward layer. The experts read the input
of the layer, and the feed-forward layer what attention has added to it."""

from dataclasses import dataclass
from typing import Any

from quire.models import llama, moe
from quire.models.llama import normed
from quire.models.llama_families import translate
from quire.models.loading import Linear, LoadedModel, TensorSpecs, Vector
from quire.models.moe import MoeConfig, MoeLayer
from quire.models.moe_families import MIXTRAL_EXPERTS, MoeFamily
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def every(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """Each `moe_layer_frequency`-th layer has experts."""
    period = hf.int("moe_layer_frequency", 2, minimum=1)
    return tuple((layer + 1) % period == 0 for layer in range(layers))


FAMILY = MoeFamily(
    defaults={"norm_topk_prob": True},
    expects={"parallel_attn_mlp_res": (True,), "use_residual": (True,), "num_experts_per_tok": (2,)},
    sparse=every,
    experts=(MIXTRAL_EXPERTS,),
    norms={"attn_norm": "input_layernorm"},
    gate_up=("block_sparse_moe.mlp.w1", "block_sparse_moe.mlp.w3"),
    down="block_sparse_moe.mlp.w2",
)


def config(hf: CheckpointConfig) -> MoeConfig:
    return MoeConfig(**moe.config_fields(translate(hf, FAMILY), FAMILY))


@dataclass(frozen=True, slots=True)
class ArcticLayer(MoeLayer):
    expert_norm: Any = None  # of what experts read


def layer_specs(c: MoeConfig) -> list[TensorSpecs]:
    """In layers with experts, the feed-forward layer is as wide as the hidden states."""
    plain: TensorSpecs = {**llama.layer_specs(c), "mlp_norm": Vector("post_attention_layernorm", c.hidden)}
    sides: TensorSpecs = {
        **moe.attention_specs(c),
        **moe.expert_specs(c, MIXTRAL_EXPERTS),
        "expert_norm": Vector("post_attention_layernorm", c.hidden),
        "mlp_norm": Vector("residual_layernorm", c.hidden),
        "gate_up": Linear({f"residual_mlp.{part}": c.hidden for part in ("w1", "w3")}, c.hidden),
        "down": Linear({"residual_mlp.w2": c.hidden}, c.hidden),
    }
    return [sides if sparse else plain for sparse in c.sparse]


def load(ops: OpSet, checkpoint: Checkpoint, config: MoeConfig, max_model_len: int) -> LoadedModel:
    layers = layer_specs(config)
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, ArcticLayer, block=block)


def block(c: MoeConfig, layer: Any, index: int, ops: OpSet, x: Value, angles: Value, batch: Any, slopes: Any) -> Value:
    attended = llama.attention(c, layer, index, ops, normed(ops, x, layer.attn_norm, c.eps), angles, batch)
    h = ops.add(x, attended)
    fed = ops.add(h, llama.mlp(c, layer, ops, normed(ops, h, layer.mlp_norm, c.eps)))
    if layer.router is None:
        return fed
    return ops.add(fed, experts(c, layer, ops, normed(ops, x, layer.expert_norm, c.eps)))


def experts(c: MoeConfig, layer: ArcticLayer, ops: OpSet, x: Value) -> Value:
    assert layer.router is not None and layer.experts_gate_up is not None and layer.experts_down is not None
    logits = ops.linear(x, layer.router)
    return ops.moe(x, logits, layer.experts_gate_up, layer.experts_down, c.routing, c.activation)

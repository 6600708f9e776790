"""gpt-oss: MoE with attention sinks, a window in every other layer, and biases everywhere.

Checkpoints interleave the rows of an expert's gate and up projections: in 4 bits (MXFP4), as one tensor an expert
(weights/formats/mxfp4.py), or in floats, all experts in one tensor, [experts, inputs, outputs]. GGUF files have gate
and up as two tensors."""

from dataclasses import replace

import numpy as np

from quire.models import llama, moe
from quire.models.layer_patterns import window_except_every
from quire.models.llama_families import translate
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpecs
from quire.models.moe import MoeConfig
from quire.models.moe_families import MoeFamily
from quire.ops.opset import Activation, Keep, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

GATE, UP, GATE_UP, DOWN = (f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "gate_up", "down"))
ALL_GATE_UP, ALL_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


FAMILY = MoeFamily(
    defaults={"norm_topk_prob": True},
    expects={"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None)},
    activations=dict.fromkeys(("silu", None), Activation.CLAMPED_SWIGLU),
    windows=window_except_every(2),
    default_window=128,
    sinks="sinks",
)


def config(hf: CheckpointConfig) -> MoeConfig:
    return MoeConfig(**moe.config_fields(translate(hf, FAMILY), FAMILY))


def load(ops: OpSet, checkpoint: Checkpoint, config: MoeConfig, max_model_len: int) -> LoadedModel:
    layers = [layer_specs(config, set(checkpoint.names()))] * config.layers
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, moe.MoeLayer, moe.feed_forward)


def layer_specs(c: MoeConfig, stored: set[str]) -> TensorSpecs:
    return {
        **moe.attention_specs(c),
        "router": Linear({"mlp.router": c.num_experts}, c.hidden, bias=True, keep=Keep.ALL),
        **_experts(c, stored),
    }


def _experts(c: MoeConfig, stored: set[str]) -> TensorSpecs:
    def is_stored(name: str) -> bool:
        return f"model.layers.0.{name.format(0)}.weight" in stored

    gate_up = ExpertLinear(
        {GATE_UP: 2 * c.expert_size}, c.hidden, c.num_experts, bias=True, order=_deinterleaved(c.expert_size)
    )
    down = ExpertLinear({DOWN: c.hidden}, c.expert_size, c.num_experts, bias=True)
    if is_stored(GATE):
        gate_up = replace(gate_up, parts={GATE: c.expert_size, UP: c.expert_size}, order=None)
    elif not is_stored(GATE_UP):
        gate_up = replace(gate_up, parts={ALL_GATE_UP: 2 * c.expert_size}, transposed=True)
        down = replace(down, parts={ALL_DOWN: c.hidden}, transposed=True)
    return {"experts_gate_up": gate_up, "experts_down": down}


def _deinterleaved(size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    rows = np.arange(2 * size, dtype=np.int32)
    return np.concatenate([rows[::2], rows[1::2]])

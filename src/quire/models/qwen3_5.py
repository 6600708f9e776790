"""Qwen3.5, dense and with experts: Qwen3-Next with the projections of its delta nets in separate tensors."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from quire.models import llama, moe, qwen3_next
from quire.models.delta_net import DeltaShape
from quire.models.llama import LlamaConfig
from quire.models.llama_families import LlamaFamily, translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.moe import MoeConfig
from quire.models.moe_families import QWEN_EXPERTS, ExpertNames, MoeFamily
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

STACKED_EXPERTS = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")
DENSE = LlamaFamily(
    defaults=qwen3_next.DEFAULTS, adapt=qwen3_next.without_layer_types, qk_norms="heads", norm_offset=1.0
)
MOE = MoeFamily(
    keys={"intermediate_size": "moe_intermediate_size"},  # no layer is without experts
    defaults={**qwen3_next.DEFAULTS, "norm_topk_prob": True},
    adapt=qwen3_next.without_layer_types,
    qk_norms="heads",
    norm_offset=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(LlamaConfig):
    delta: DeltaShape
    converted: bool = False  # see Qwen3NextConfig

    @property
    def delta_eps(self) -> float:
        return self.eps


def config(hf: CheckpointConfig) -> Qwen35Config | qwen3_next.Qwen3NextConfig:
    if hf.architecture == "Qwen3_5MoeForCausalLM":
        adapted = translate(hf, MOE)
        fields = moe.config_fields(adapted, MOE)
        return qwen3_next.Qwen3NextConfig(**qwen3_next.delta_fields(hf, adapted, fields))
    adapted = translate(hf, DENSE)
    return Qwen35Config(**qwen3_next.delta_fields(hf, adapted, llama.config_fields(adapted, DENSE)))


def layer_specs(c: Any, stored: Container[str]) -> list[TensorSpecs]:
    mixers = qwen3_next.mixer_specs(c, stored)
    return [{**qwen3_next.norm_specs(c), **mixers[kind], **feed_forward_specs(c, stored)} for kind in c.kinds]


def feed_forward_specs(c: Any, stored: Container[str]) -> TensorSpecs:
    if isinstance(c, MoeConfig):
        stacked = f"model.layers.0.{STACKED_EXPERTS.down}" in stored
        return moe.expert_specs(c, STACKED_EXPERTS if stacked else QWEN_EXPERTS)
    return {name: spec for name, spec in llama.layer_specs(c).items() if name in ("gate_up", "down")}


def load(ops: OpSet, checkpoint: Checkpoint, config: Any, max_model_len: int) -> LoadedModel:
    layers = layer_specs(config, set(checkpoint.names()))
    return qwen3_next.load_layers(ops, checkpoint, config, max_model_len, layers)

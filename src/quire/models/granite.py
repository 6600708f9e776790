"""Granite, with or without experts: Llama or a mixture, with factors on embeddings, scores, residuals and logits."""

from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import llama, mixture
from quire.models.llama import LlamaConfig
from quire.models.loading import Model
from quire.models.mixture import MixtureConfig
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> LlamaConfig:
    hf.expect("hidden_act", "silu")
    if hf.architecture == "GraniteMoeForCausalLM":
        return MixtureConfig(**mixture.numbers(hf) | _factors(hf))
    return LlamaConfig(**llama.numbers(hf) | _factors(hf))


def _factors(hf: CheckpointConfig) -> dict[str, Any]:
    divisor = hf.float("logits_scaling", 1.0)
    if divisor == 0:
        raise BadCheckpoint("logits_scaling is 0, and logits are divided by it")
    return {
        "embed_scale": hf.float("embedding_multiplier", 1.0),
        "score_scale": hf.float("attention_multiplier", 1.0),
        "residual_scale": hf.float("residual_multiplier", 1.0),
        "logit_scale": 1 / divisor,
    }


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> Model:
    if isinstance(config, MixtureConfig):
        return mixture.load(ops, checkpoint, config, max_model_len)
    return llama.load(ops, checkpoint, config, max_model_len)

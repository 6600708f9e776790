"""Granite, with or without experts: Llama or MoE, with factors on embeddings, scores, residuals and logits. Those of Granite 4 that have attention in all layers and no experts are the same under other names, and may not rotate.
MiniCPM has such factors under other names too."""

from math import sqrt
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, moe
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel, Matrix
from quire.models.moe import MoeConfig
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

HYBRID, MINICPM = "GraniteMoeHybridForCausalLM", "MiniCPMForCausalLM"


def config(hf: CheckpointConfig) -> LlamaConfig:
    hf.expect("hidden_act", "silu")
    if hf.architecture == "GraniteMoeForCausalLM":
        return MoeConfig(**moe.numbers(hf) | _factors(hf))
    if hf.architecture == MINICPM:
        return LlamaConfig(**llama.numbers(hf) | _minicpm_factors(hf))
    if hf.architecture == HYBRID:
        return LlamaConfig(**_hybrid_numbers(hf) | _factors(hf))
    return LlamaConfig(**llama.numbers(hf) | _factors(hf))


def _hybrid_numbers(hf: CheckpointConfig) -> dict[str, Any]:
    layers = hf.int("num_hidden_layers")
    kinds = hf.list("layer_types", hf.list("layers_block_type", ["mamba"] * layers))
    if others := sorted({str(kind) for kind in kinds} - {"attention", "full_attention"}):
        raise Unsupported(
            f"the layers of `{HYBRID}` are {', '.join(others)}", "those with attention in all are supported"
        )
    hf.expect("num_local_experts", 0, None)
    rotates = hf.expect("position_embedding_type", "rope", "nope", None) == "rope"
    inside = hf.int("shared_intermediate_size", 1024)
    values = {"layer_types": None, "intermediate_size": inside, "sliding_window": None}
    return llama.numbers(hf.with_values(values)) | {"rotated": (rotates,) * layers}


def _minicpm_factors(hf: CheckpointConfig) -> dict[str, Any]:
    return {
        "embed_scale": hf.float("scale_emb", 1.0),
        "residual_scale": hf.float("scale_depth", 1.0) / sqrt(hf.int("num_hidden_layers")),
        "logit_scale": hf.float("dim_model_base", 1.0) / hf.int("hidden_size"),
    }


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


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    if isinstance(config, MoeConfig):
        return moe.load(ops, checkpoint, config, max_model_len)
    if config.architecture == HYBRID:
        names = dict(llama.layer_names(config))
        names["gate_up"] = Matrix({"shared_mlp.input_linear": 2 * config.intermediate}, config.hidden)
        names["down"] = Matrix({"shared_mlp.output_linear": config.hidden}, config.intermediate)
        return llama.load_as(ops, checkpoint, config, max_model_len, names)
    return llama.load(ops, checkpoint, config, max_model_len)

"""Phi-3: Llama, whose checkpoints hold q, k and v in one tensor, and gate and up in another."""

from quire.models import llama
from quire.models.loading import LoadedModel, Matrix
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint

config = llama.config


def load(ops: OpSet, checkpoint: Checkpoint, config: llama.LlamaConfig, max_model_len: int) -> LoadedModel:
    fused = {
        "qkv": Matrix({"self_attn.qkv_proj": config.q_size + 2 * config.kv_size}, config.hidden),
        "gate_up": Matrix({"mlp.gate_up_proj": 2 * config.intermediate}, config.hidden),
    }
    return llama.load_as(ops, checkpoint, config, max_model_len, {**llama.layer_names(config), **fused})

"""GLM-4: Llama that rotates the first half of each head, in pairs side by side, and stores gate and up in one tensor.
From GLM-4-0414 on, what a layer adds is normed as well. GGUF files may have q, k and v in one tensor too."""

import numpy as np

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel, Matrix, TensorPart, Vector
from quire.models.row_orders import pairs_apart
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FUSED = "self_attn.qkv_proj"


def config(hf: CheckpointConfig) -> LlamaConfig:
    hf.expect("hidden_act", "silu")
    hf = hf.with_values({"partial_rotary_factor": hf.get("partial_rotary_factor", 0.5)})
    return LlamaConfig(**llama.numbers(hf) | {"pairwise": True, "out_bias": False})


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    names = dict(llama.layer_names(config))
    names["gate_up"] = Matrix({"mlp.gate_up_proj": 2 * config.intermediate}, config.hidden)
    if f"model.layers.0.{FUSED}.weight" in checkpoint.names():
        turning = pairs_apart(config.heads + config.kv_heads, config.head_dim, config.rope.rotary_dim)
        order = np.concatenate([turning, len(turning) + np.arange(config.kv_size, dtype=np.int32)])
        names["qkv"] = Matrix({FUSED: TensorPart(len(order), order)}, config.hidden, bias=config.qkv_bias)
    if config.architecture == "Glm4ForCausalLM":
        names["after1"] = Vector("post_self_attn_layernorm", config.hidden)
        names["after2"] = Vector("post_mlp_layernorm", config.hidden)
    return llama.load_as(ops, checkpoint, config, max_model_len, names)

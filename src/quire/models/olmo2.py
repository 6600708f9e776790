"""OLMo 2: Llama whose norms come after attention and feed-forward, with norms of whole queries and keys."""

from typing import Any

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import Model, Vector
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> LlamaConfig:
    hf.expect("hidden_act", "silu")
    return LlamaConfig(**llama.numbers(hf) | {"qk_norms": "rows"})


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> Model:
    after = {
        "norm1": Vector("post_attention_layernorm", config.hidden),
        "norm2": Vector("post_feedforward_layernorm", config.hidden),
    }
    names = [{**llama.layer_names(config), **after}] * config.layers
    return llama.load_with(ops, checkpoint, config, max_model_len, forward, names)


def forward(c: LlamaConfig, w: llama.Weights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.embedding(batch.ids, w.embed)
    for index, layer in enumerate(w.layers):
        found = llama.attention(c, layer, index, ops, x, angles, batch)
        x = ops.add(x, ops.rms_norm(found, layer.norm1, c.eps))
        x = ops.add(x, ops.rms_norm(llama.mlp(c, layer, ops, x), layer.norm2, c.eps))
    return ops.logits(ops.rms_norm(x, w.norm, c.eps), w.head, batch)

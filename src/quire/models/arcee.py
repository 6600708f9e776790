"""Arcee's AFM: Llama, whose feed-forward layer squares what is above zero and has no gate."""

from functools import partial

from quire.models import llama
from quire.models.activations import read_activation
from quire.models.llama import LlamaConfig, LlamaLayer
from quire.models.loading import LoadedModel, Matrix
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> LlamaConfig:
    return LlamaConfig(**llama.numbers(hf) | {"activation": read_activation(hf, "hidden_act", "relu2")})


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    up = Matrix({"mlp.up_proj": config.intermediate}, config.hidden, bias=config.mlp_bias)
    names = [{**llama.layer_names(config), "gate_up": up}] * config.layers
    return llama.load_with(ops, checkpoint, config, max_model_len, partial(llama.forward, feed_forward=mlp), names)


def mlp(c: LlamaConfig, layer: LlamaLayer, ops: OpSet, x: Value) -> Value:
    return ops.linear(ops.activate(ops.linear(x, layer.gate_up), c.activation), layer.down)

"""StarCoder2: rotary, grouped keys, a window, and biases everywhere."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import LayerNorm, LoadedModel, Matrix, TokenTable, Wanted
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("mlp_type", "default", None)
    hf.expect("norm_type", "layer_norm", None)
    return gpt.read_config(
        hf,
        rotary=hf,
        kv_heads=hf.int("num_key_value_heads"),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "gelu_pytorch_tanh"),
        eps=hf.float("norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        bias=hf.bool("use_bias", True),
        windows=(hf.int("sliding_window", 0),) * hf.int("num_hidden_layers"),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: Wanted = {
        "embed": TokenTable("embed_tokens", config.vocab, config.hidden),
        "norm": LayerNorm("norm", config.hidden),
    }
    names = gpt.GPTTensors("model.", "layers", top, layer_names(config))
    return gpt.load_as(ops, checkpoint, config, max_model_len, names)


def layer_names(c: gpt.GPTConfig) -> Wanted:
    qkv = {"self_attn.q_proj": c.q_size, "self_attn.k_proj": c.kv_size, "self_attn.v_proj": c.kv_size}
    return {
        "norm1": LayerNorm("input_layernorm", c.hidden),
        "qkv": Matrix(qkv, c.hidden, c.bias),
        "out": Matrix({"self_attn.o_proj": c.hidden}, c.q_size, c.bias),
        "norm2": LayerNorm("post_attention_layernorm", c.hidden),
        "up": Matrix({"mlp.c_fc": c.intermediate}, c.hidden, c.bias),
        "down": Matrix({"mlp.c_proj": c.hidden}, c.intermediate, c.bias),
    }

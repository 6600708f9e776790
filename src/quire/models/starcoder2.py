"""StarCoder2: rope, grouped-query attention, a window, and biases everywhere."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
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
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": LayerNorm("norm", config.hidden),
    }
    tensors = gpt.GPTTensors("model.", "layers", top, layer_specs(config))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    qkv = {"self_attn.q_proj": c.q_size, "self_attn.k_proj": c.kv_size, "self_attn.v_proj": c.kv_size}
    return {
        "attn_norm": LayerNorm("input_layernorm", c.hidden),
        "qkv": Linear(qkv, c.hidden, c.bias),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size, c.bias),
        "mlp_norm": LayerNorm("post_attention_layernorm", c.hidden),
        "up": Linear({"mlp.c_fc": c.intermediate}, c.hidden, c.bias),
        "down": Linear({"mlp.c_proj": c.hidden}, c.intermediate, c.bias),
    }

"""OLMo (the first): Llama with layer norms that have no weights; some clip q, k and v."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    return gpt.read_config(
        hf,
        rotary=hf,
        kv_heads=hf.int("num_key_value_heads", hf.int("num_attention_heads")),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "silu"),
        bias=hf.bool("attention_bias", False),
        gated=True,
        clip_qkv=hf.float("clip_qkv", 0.0),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": plain_norm("norm", config),
    }
    tensors = gpt.GPTTensors("model.", "layers", top, layer_specs(config))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    qkv = {"self_attn.q_proj": c.q_size, "self_attn.k_proj": c.kv_size, "self_attn.v_proj": c.kv_size}
    return {
        "attn_norm": plain_norm("input_layernorm", c),
        "qkv": Linear(qkv, c.hidden, c.bias),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size, c.bias),
        "mlp_norm": plain_norm("post_attention_layernorm", c),
        "up": Linear({"mlp.gate_proj": c.intermediate, "mlp.up_proj": c.intermediate}, c.hidden),
        "down": Linear({"mlp.down_proj": c.hidden}, c.intermediate),
    }


def plain_norm(name: str, c: gpt.GPTConfig) -> LayerNorm:
    return LayerNorm(name, c.hidden, weight=False, bias=False)

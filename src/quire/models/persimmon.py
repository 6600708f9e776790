"""Persimmon: a norm for queries and keys, rope on a part of each head, and a squared ReLU without a gate."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import ungrouped_qkv
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    return gpt.read_config(
        hf,
        rotary=hf.with_values({"partial_rotary_factor": hf.get("partial_rotary_factor", 0.5)}),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "relu2"),
        eps=hf.float("layer_norm_eps", 1e-5),
        head_norms=hf.bool("qk_layernorm", True),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": LayerNorm("final_layernorm", config.hidden),
    }
    by_head = not checkpoint.config.bool(gpt.QKV_UNGROUPED, False)
    layer = layer_specs(config, by_head)
    return gpt.load_model(ops, checkpoint, config, max_model_len, gpt.GPTTensors("model.", "layers", top, layer))


def layer_specs(c: gpt.GPTConfig, by_head: bool) -> TensorSpecs:
    order = ungrouped_qkv(c.heads, c.heads, c.head_dim)
    qkv = LinearPart(3 * c.q_size, order, already_ordered=not by_head)
    return {
        "attn_norm": LayerNorm("input_layernorm", c.hidden),
        "qkv": Linear({"self_attn.query_key_value": qkv}, c.hidden, bias=True),
        **{f"{x}_norm": LayerNorm(f"self_attn.{x}_layernorm", c.head_dim) for x in "qk" if c.head_norms},
        "out": Linear({"self_attn.dense": c.hidden}, c.q_size, bias=True),
        "mlp_norm": LayerNorm("post_attention_layernorm", c.hidden),
        "up": Linear({"mlp.dense_h_to_4h": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"mlp.dense_4h_to_h": c.hidden}, c.intermediate, bias=True),
    }

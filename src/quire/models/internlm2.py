"""InternLM 2: Llama under other names, with q, k and v in one tensor, the queries that share a key beside it."""

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel, Matrix, TensorPart
from quire.models.row_orders import groups_apart
from quire.models.text_part import Renamed
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

OURS = {
    "output.": "lm_head.",
    "model.tok_embeddings.": "model.embed_tokens.",
    ".attention_norm.": ".input_layernorm.",
    ".attention.wqkv.": ".self_attn.qkv_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}


def config(hf: CheckpointConfig) -> LlamaConfig:
    return llama.config(hf.with_values({"attention_bias": hf.bool("bias", False)}))


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    order = groups_apart(config.kv_heads, config.heads, config.head_dim)
    qkv = Matrix({"self_attn.qkv_proj": TensorPart(len(order), order)}, config.hidden, bias=config.qkv_bias)
    renamed = Renamed.by_parts(checkpoint, OURS)
    return llama.load_as(ops, renamed, config, max_model_len, {**llama.layer_names(config), "qkv": qkv})

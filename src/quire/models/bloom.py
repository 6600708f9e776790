"""BLOOM: ALiBi, and a norm behind the embedding; q, k and v are stored head by head."""

from dataclasses import replace

from quire.models import alibi, gpt
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import ungrouped_qkv
from quire.ops.opset import Activation, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

TRAINED_LENGTH = 2048  # of all BLOOMs, and config.json may leave it out


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("apply_residual_connection_post_layernorm", False, None)
    hf.expect("slow_but_exact", False, None)
    c = gpt.read_config(
        hf,
        default_length=TRAINED_LENGTH,
        activation=Activation.GELU_TANH,
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
    )
    return replace(c, slopes=alibi.alibi_slopes(c.heads))


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("word_embeddings", config.vocab, config.hidden),
        "embed_norm": LayerNorm("word_embeddings_layernorm", config.hidden),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    layer = layer_specs(config, by_head=not checkpoint.config.bool(gpt.QKV_UNGROUPED, False))
    return gpt.load_model(ops, checkpoint, config, max_model_len, gpt.GPTTensors("transformer.", "h", top, layer))


def layer_specs(c: gpt.GPTConfig, by_head: bool) -> TensorSpecs:
    qkv = LinearPart(3 * c.q_size, ungrouped_qkv(c.heads, c.heads, c.head_dim), already_ordered=not by_head)
    return {
        "attn_norm": LayerNorm("input_layernorm", c.hidden),
        "qkv": Linear({"self_attention.query_key_value": qkv}, c.hidden, bias=True),
        "out": Linear({"self_attention.dense": c.hidden}, c.q_size, bias=True),
        "mlp_norm": LayerNorm("post_attention_layernorm", c.hidden),
        "up": Linear({"mlp.dense_h_to_4h": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"mlp.dense_4h_to_h": c.hidden}, c.intermediate, bias=True),
    }

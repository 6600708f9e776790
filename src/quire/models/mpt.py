"""MPT: ALiBi, no biases; some have norms of q and k, or clip q, k and v."""

from dataclasses import replace

from quire.core.errors import Unsupported
from quire.models import alibi, gpt
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
from quire.ops.opset import Activation, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("no_bias", True, None)
    hf.expect("expansion_ratio", 4, None)
    hf.expect("logit_scale", None)
    hf.expect("norm_type", "low_precision_layernorm", "layernorm", None)
    attention = hf.section("attn_config")
    attention.expect("attn_type", "multihead_attention", None)
    attention.expect("alibi", True, None)
    attention.expect("prefix_lm", False, None)
    max_bias = attention.float("alibi_bias_max", 8.0)
    if max_bias <= 0:  # in GGUF files: no ALiBi
        raise Unsupported(f"{hf.source}: attn_config.alibi_bias_max is {max_bias}", "supported: numbers above 0")
    c = gpt.read_config(
        hf,
        activation=Activation.GELU,
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        bias=False,
        clip_qkv=attention.float("clip_qkv", 0.0),
    )
    attention.expect("kv_n_heads", c.heads, None)
    return replace(c, scale=attention.float("softmax_scale", c.scale), slopes=alibi.alibi_slopes(c.heads, max_bias))


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("wte", config.vocab, config.hidden),
        "norm": LayerNorm("norm_f", config.hidden, bias=False),
    }
    layer = layer_specs(config, qk_norms=checkpoint.config.section("attn_config").bool("qk_ln", False))
    return gpt.load_model(ops, checkpoint, config, max_model_len, gpt.GPTTensors("transformer.", "blocks", top, layer))


def layer_specs(c: gpt.GPTConfig, qk_norms: bool) -> TensorSpecs:
    norms = {f"{x}_norm": LayerNorm(f"attn.{x}_ln", c.hidden, bias=False) for x in ("q", "k") if qk_norms}
    return {
        "attn_norm": LayerNorm("norm_1", c.hidden, bias=False),
        "qkv": Linear({"attn.Wqkv": 3 * c.q_size}, c.hidden),
        **norms,
        "out": Linear({"attn.out_proj": c.hidden}, c.q_size),
        "mlp_norm": LayerNorm("norm_2", c.hidden, bias=False),
        "up": Linear({"ffn.up_proj": c.intermediate}, c.hidden),
        "down": Linear({"ffn.down_proj": c.hidden}, c.intermediate),
    }

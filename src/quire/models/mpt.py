"""MPT: slopes instead of positions, no biases; some have norms of q and k, or keep them in a range."""

from dataclasses import replace

from quire.core.errors import Unsupported
from quire.models import alibi, gpt
from quire.models.loading import LayerNorm, LoadedModel, Matrix, TokenTable, Wanted
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
    most = attention.float("alibi_bias_max", 8.0)
    if most <= 0:  # GGUF's way to say that there are no slopes
        raise Unsupported(f"{hf.source}: attn_config.alibi_bias_max is {most}", "supported: numbers above 0")
    c = gpt.read_config(
        hf,
        activation=Activation.GELU,
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        bias=False,
        clip=attention.float("clip_qkv", 0.0),
    )
    attention.expect("kv_n_heads", c.heads, None)
    return replace(c, scale=attention.float("softmax_scale", c.scale), slopes=alibi.slopes(c.heads, most))


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: Wanted = {
        "embed": TokenTable("wte", config.vocab, config.hidden),
        "norm": LayerNorm("norm_f", config.hidden, bias=False),
    }
    layer = layer_names(config, qk_norms=checkpoint.config.section("attn_config").bool("qk_ln", False))
    return gpt.load_as(ops, checkpoint, config, max_model_len, gpt.GPTTensors("transformer.", "blocks", top, layer))


def layer_names(c: gpt.GPTConfig, qk_norms: bool) -> Wanted:
    norms = {f"{x}_norm": LayerNorm(f"attn.{x}_ln", c.hidden, bias=False) for x in ("q", "k") if qk_norms}
    return {
        "norm1": LayerNorm("norm_1", c.hidden, bias=False),
        "qkv": Matrix({"attn.Wqkv": 3 * c.q_size}, c.hidden),
        **norms,
        "out": Matrix({"attn.out_proj": c.hidden}, c.q_size),
        "norm2": LayerNorm("norm_2", c.hidden, bias=False),
        "up": Matrix({"ffn.up_proj": c.intermediate}, c.hidden),
        "down": Matrix({"ffn.down_proj": c.hidden}, c.intermediate),
    }

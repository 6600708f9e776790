"""Command R, R7B and A (Cohere): attention and MLP in parallel behind one norm without a bias, and interleaved rotary
pairs. R+ has a norm for each query and key head. In R7B and A, layers have either a window or no rope."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.layer_patterns import listed_windows, window_by_pattern
from quire.models.loading import (
    EmbeddingTable,
    HeadLayerNorms,
    LayerNorm,
    Linear,
    LinearPart,
    LoadedModel,
    TensorSpec,
    TensorSpecs,
)
from quire.models.qkv_order import deinterleaved_rope
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    layers = hf.int("num_hidden_layers")
    has_windows = hf.architecture == "Cohere2ForCausalLM"
    windows = (0,) * layers
    if has_windows:
        missing = {"sliding_window": 4096, "sliding_window_pattern": 4}
        hf = hf.with_values({key: value for key, value in missing.items() if not hf.is_given(key)})
        windows = (listed_windows if "layer_types" in hf else window_by_pattern)(hf, layers)
    return gpt.read_config(
        hf,
        rotary=hf if has_windows else hf.with_values({"rope_theta": hf.float("rope_theta", 500_000.0)}),
        kv_heads=hf.int("num_key_value_heads", hf.int("num_attention_heads")),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "silu"),
        eps=hf.float("layer_norm_eps", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        bias=hf.bool("attention_bias", False),
        gated=True,
        parallel=True,
        head_norms=hf.bool("use_qk_norm", False),
        windows=windows,
        rotated=tuple(map(bool, windows)) if has_windows else None,
        logit_scale=hf.float("logit_scale", 0.0625),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": LayerNorm("norm", config.hidden, bias=False),
    }
    return gpt.load_model(
        ops, checkpoint, config, max_model_len, gpt.GPTTensors("model.", "layers", top, layer_specs(config))
    )


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    assert c.rope is not None
    q = LinearPart(c.q_size, deinterleaved_rope(c.heads, c.head_dim, c.rope.rotary_dim))
    k = LinearPart(c.kv_size, deinterleaved_rope(c.kv_heads, c.head_dim, c.rope.rotary_dim))
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": LinearPart(c.kv_size)}
    specs: dict[str, TensorSpec] = {
        "attn_norm": LayerNorm("input_layernorm", c.hidden, bias=False),
        "qkv": Linear(qkv, c.hidden, c.bias),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size, c.bias),
        "up": Linear({"mlp.gate_proj": c.intermediate, "mlp.up_proj": c.intermediate}, c.hidden),
        "down": Linear({"mlp.down_proj": c.hidden}, c.intermediate),
    }
    if c.head_norms:
        specs |= {
            "q_norm": HeadLayerNorms("self_attn.q_norm", c.heads, c.head_dim, q.order),
            "k_norm": HeadLayerNorms("self_attn.k_norm", c.kv_heads, c.head_dim, k.order),
        }
    return specs

"""GPT-2 and StarCoder (GPTBigCode): learned positions. JAIS is GPT-2 with ALiBi, a gate and factors.

GPT-2 stores its matrices as [inputs, outputs]. StarCoder has either one key head for all queries (`multi_query`) or, as
GPT-NeoX, q, k and v stored head by head."""

from dataclasses import dataclass, replace

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.alibi import alibi_slopes
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import ungrouped_qkv
from quire.ops.opset import Activation, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

INPUTS_FIRST = "matrices_inputs_first"  # config key of GGUF files: false, their converter transposes matrices


@dataclass(frozen=True, slots=True)
class GPT2Family:
    activation: str  # where `activation_function` does not say
    multi_query: bool  # whether it may have one key head for all queries
    inputs_first: bool  # matrices are stored as [inputs, outputs]
    qkv_by_head: bool  # q, k and v are stored head by head
    jais: bool = False  # ALiBi instead of positions, a gate in the feed-forward layer, and factors


FAMILIES = {
    "GPT2LMHeadModel": GPT2Family("gelu_new", multi_query=False, inputs_first=True, qkv_by_head=False),
    "GPTBigCodeForCausalLM": GPT2Family("gelu_pytorch_tanh", multi_query=True, inputs_first=False, qkv_by_head=True),
    "JAISLMHeadModel": GPT2Family("swiglu", multi_query=False, inputs_first=True, qkv_by_head=False, jais=True),
}


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("scale_attn_weights", True, None)
    hf.expect("scale_attn_by_inverse_layer_idx", False, None)
    hf.expect("add_cross_attention", False, None)
    family = FAMILIES[hf.architecture]
    one_key_head = family.multi_query and hf.bool("multi_query", True)
    activation = None if family.jais else read_activation(hf, "activation_function", family.activation)
    c = gpt.read_config(
        hf,
        activation=activation or Activation.SILU,
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
    )
    c = replace(c, kv_heads=1 if one_key_head else c.heads, intermediate=hf.int("n_inner", c.intermediate))
    return jais(hf, c) if family.jais else c


def jais(hf: CheckpointConfig, c: gpt.GPTConfig) -> gpt.GPTConfig:
    """Older configurations name the factors otherwise."""
    hf.expect("activation_function", "swiglu")
    hf.expect("position_embedding_type", "alibi")
    width = hf.float("mup_output_alpha", 1.0) * hf.float("mup_width_scale", 1.0)
    return replace(
        c,
        gated=True,
        slopes=alibi_slopes(c.heads, hf.float("max_alibi_bias", 8.0)),
        scale=1 / c.head_dim if hf.bool("mup_scale_qk_dot_by_d", hf.bool("scale_qk_dot_by_d", False)) else c.scale,
        embed_scale=hf.float("mup_embeddings_scale", hf.float("embeddings_scale", 1.0)),
        logit_scale=width if "mup_output_alpha" in hf else hf.float("width_scale", 1.0),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    family = FAMILIES[config.architecture]
    inputs_first = family.inputs_first and checkpoint.config.bool(INPUTS_FIRST, True)
    top: TensorSpecs = {
        "embed": EmbeddingTable("wte", config.vocab, config.hidden),
        **({} if config.slopes else {"positions": EmbeddingTable("wpe", config.max_position, config.hidden)}),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    tensors = gpt.GPTTensors("transformer.", "h", top, layer_specs(config, inputs_first, by_head=family.qkv_by_head))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig, inputs_first: bool, by_head: bool) -> TensorSpecs:
    order = ungrouped_qkv(c.kv_heads, c.heads, c.head_dim) if by_head else None

    up = ("mlp.c_fc2", "mlp.c_fc") if c.gated else ("mlp.c_fc",)

    def linear(name: str, outputs: int | LinearPart, inputs: int) -> Linear:
        return Linear({name: outputs}, inputs, bias=True, transposed=inputs_first)

    return {
        "attn_norm": LayerNorm("ln_1", c.hidden),
        "qkv": linear("attn.c_attn", LinearPart(c.q_size + 2 * c.kv_size, order), c.hidden),
        "out": linear("attn.c_proj", c.hidden, c.q_size),
        "mlp_norm": LayerNorm("ln_2", c.hidden),
        "up": Linear(dict.fromkeys(up, c.intermediate), c.hidden, bias=True, transposed=inputs_first),
        "down": linear("mlp.c_proj", c.hidden, c.intermediate),
    }

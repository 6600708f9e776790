"""GPT-2 and StarCoder (GPTBigCode): learned positions.

GPT-2 stores its matrices as [inputs, outputs]. StarCoder has either one key head for all queries (`multi_query`) or, as
GPT-NeoX, q, k and v stored head by head."""

from dataclasses import dataclass, replace

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import ungrouped_qkv
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

INPUTS_FIRST = "matrices_inputs_first"  # config key of GGUF files: false, their converter transposes matrices


@dataclass(frozen=True, slots=True)
class GPT2Family:
    activation: str  # where `activation_function` does not say
    multi_query: bool  # it may have one key head for all queries
    inputs_first: bool  # matrices are stored as [inputs, outputs]
    qkv_by_head: bool  # q, k and v are stored head by head


FAMILIES = {
    "GPT2LMHeadModel": GPT2Family("gelu_new", multi_query=False, inputs_first=True, qkv_by_head=False),
    "GPTBigCodeForCausalLM": GPT2Family("gelu_pytorch_tanh", multi_query=True, inputs_first=False, qkv_by_head=True),
}


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("scale_attn_weights", True, None)
    hf.expect("scale_attn_by_inverse_layer_idx", False, None)
    hf.expect("add_cross_attention", False, None)
    family = FAMILIES[hf.architecture]
    one_key_head = family.multi_query and hf.bool("multi_query", True)
    c = gpt.read_config(
        hf,
        activation=read_activation(hf, "activation_function", family.activation),
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
    )
    return replace(c, kv_heads=1 if one_key_head else c.heads, intermediate=hf.int("n_inner", c.intermediate))


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    family = FAMILIES[config.architecture]
    inputs_first = family.inputs_first and checkpoint.config.bool(INPUTS_FIRST, True)
    top: TensorSpecs = {
        "embed": EmbeddingTable("wte", config.vocab, config.hidden),
        "positions": EmbeddingTable("wpe", config.max_position, config.hidden),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    tensors = gpt.GPTTensors("transformer.", "h", top, layer_specs(config, inputs_first, by_head=family.qkv_by_head))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig, inputs_first: bool, by_head: bool) -> TensorSpecs:
    order = ungrouped_qkv(c.kv_heads, c.heads, c.head_dim) if by_head else None

    def linear(name: str, outputs: int | LinearPart, inputs: int) -> Linear:
        return Linear({name: outputs}, inputs, bias=True, transposed=inputs_first)

    return {
        "attn_norm": LayerNorm("ln_1", c.hidden),
        "qkv": linear("attn.c_attn", LinearPart(c.q_size + 2 * c.kv_size, order), c.hidden),
        "out": linear("attn.c_proj", c.hidden, c.q_size),
        "mlp_norm": LayerNorm("ln_2", c.hidden),
        "up": linear("mlp.c_fc", c.intermediate, c.hidden),
        "down": linear("mlp.c_proj", c.hidden, c.intermediate),
    }

"""GPT-2 and StarCoder (GPTBigCode): learned positions.

GPT-2 stores its matrices with the inputs first. StarCoder stores them as others do, and either has one key head for all
(multi_query) or, as GPT-NeoX, stores q, k and v head by head."""

from dataclasses import replace

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import LayerNorm, LoadedModel, Matrix, TensorPart, TokenTable, Wanted
from quire.models.row_orders import groups_apart
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

INPUTS_FIRST = "matrices_inputs_first"  # false in GGUF files, whose converter has transposed them


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("scale_attn_weights", True, None)
    hf.expect("scale_attn_by_inverse_layer_idx", False, None)
    hf.expect("add_cross_attention", False, None)
    big_code = hf.architecture == "GPTBigCodeForCausalLM"
    one_key_head = big_code and hf.bool("multi_query", True)
    c = gpt.read_config(
        hf,
        activation=read_activation(hf, "activation_function", "gelu_pytorch_tanh" if big_code else "gelu_new"),
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
    )
    return replace(c, kv_heads=1 if one_key_head else c.heads, intermediate=hf.int("n_inner", c.intermediate))


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    big_code = config.architecture == "GPTBigCodeForCausalLM"
    inputs_first = not big_code and checkpoint.config.bool(INPUTS_FIRST, True)
    top: Wanted = {
        "embed": TokenTable("wte", config.vocab, config.hidden),
        "positions": TokenTable("wpe", config.max_position, config.hidden),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    names = gpt.GPTTensors("transformer.", "h", top, layer_names(config, inputs_first, by_head=big_code))
    return gpt.load_as(ops, checkpoint, config, max_model_len, names)


def layer_names(c: gpt.GPTConfig, inputs_first: bool, by_head: bool) -> Wanted:
    order = groups_apart(c.kv_heads, c.heads, c.head_dim) if by_head else None

    def linear(name: str, outputs: int | TensorPart, inputs: int) -> Matrix:
        return Matrix({name: outputs}, inputs, bias=True, transposed=inputs_first)

    return {
        "norm1": LayerNorm("ln_1", c.hidden),
        "qkv": linear("attn.c_attn", TensorPart(c.q_size + 2 * c.kv_size, order), c.hidden),
        "out": linear("attn.c_proj", c.hidden, c.q_size),
        "norm2": LayerNorm("ln_2", c.hidden),
        "up": linear("mlp.c_fc", c.intermediate, c.hidden),
        "down": linear("mlp.c_proj", c.hidden, c.intermediate),
    }

"""XGLM and BioGPT: decoders with the tensors of BART's, whose embedding may be scaled by sqrt(hidden).

XGLM's positions are sinusoidal, and BioGPT's are learned."""

from dataclasses import dataclass
from math import sqrt

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.bart import SKIPPED, SinusoidalPositions
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class XGLMFamily:
    base: str
    head: str
    learned_positions: bool
    hidden: str  # keys of config.json
    layers: str
    heads: str
    intermediate: str
    activation: str


FAMILIES = {
    "XGLMForCausalLM": XGLMFamily(
        "model.", "lm_head", False, "d_model", "num_layers", "attention_heads", "ffn_dim", "activation_function"
    ),
    "BioGptForCausalLM": XGLMFamily(
        "biogpt.",
        "output_projection",
        True,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
    ),
}


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    family = FAMILIES[hf.architecture]
    hf.expect("add_cross_attention", False, None)
    sizes = {"num_hidden_layers": hf.int(family.layers), "num_attention_heads": hf.int(family.heads)}
    return gpt.read_config(
        hf.with_values(sizes),
        intermediate=hf.int(family.intermediate),
        activation=read_activation(hf, family.activation, "gelu"),
        tied=hf.bool("tie_word_embeddings", True),
        embed_scale=sqrt(hf.int(family.hidden)) if hf.bool("scale_embedding", True) else 1.0,
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    family = FAMILIES[config.architecture]
    learned = EmbeddingTable("embed_positions", config.max_position, config.hidden, skip_rows=SKIPPED)
    sinusoidal = SinusoidalPositions(config.max_position, config.hidden, tensor2tensor_offset=SKIPPED)
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "positions": learned if family.learned_positions else sinusoidal,
        "norm": LayerNorm("layer_norm", config.hidden),
    }
    tensors = gpt.GPTTensors(family.base, "layers", top, layer_specs(config), family.head)
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    return {
        "attn_norm": LayerNorm("self_attn_layer_norm", c.hidden),
        "qkv": Linear({f"self_attn.{x}_proj": c.q_size for x in "qkv"}, c.hidden, bias=True),
        "out": Linear({"self_attn.out_proj": c.hidden}, c.q_size, bias=True),
        "mlp_norm": LayerNorm("final_layer_norm", c.hidden),
        "up": Linear({"fc1": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"fc2": c.hidden}, c.intermediate, bias=True),
    }

"""Nemotron and Jais 2: rope, layer norms, and a feed-forward layer without a gate whose activation is ReLU squared.
Nemotron's norm weights are stored less 1."""

from dataclasses import dataclass

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class NemotronFamily:
    eps_key: str
    bias: bool  # of all linear layers, where `attention_bias` does not say
    rotary_factor: float  # fraction of a head that is rotated, where config.json does not say
    norm_offset: float  # added to stored norm weights


FAMILIES = {
    "NemotronForCausalLM": NemotronFamily("norm_eps", bias=False, rotary_factor=0.5, norm_offset=1.0),
    "Jais2ForCausalLM": NemotronFamily("layer_norm_eps", bias=True, rotary_factor=1.0, norm_offset=0.0),
}


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    family = FAMILIES[hf.architecture]
    hf.expect("mlp_bias", hf.get("attention_bias", family.bias), None)
    return gpt.read_config(
        hf,
        rotary=hf.with_values({"partial_rotary_factor": hf.get("partial_rotary_factor", family.rotary_factor)}),
        kv_heads=hf.int("num_key_value_heads", hf.int("num_attention_heads")),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "relu2"),
        eps=hf.float(family.eps_key, 1e-5),
        bias=hf.bool("attention_bias", family.bias),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": _norm(config, "norm"),
    }
    tensors = gpt.GPTTensors("model.", "layers", top, layer_specs(config))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    qkv = {f"self_attn.{x}_proj": size for x, size in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size))}
    return {
        "attn_norm": _norm(c, "input_layernorm"),
        "qkv": Linear(qkv, c.hidden, c.bias),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size, c.bias),
        "mlp_norm": _norm(c, "post_attention_layernorm"),
        "up": Linear({"mlp.up_proj": c.intermediate}, c.hidden, c.bias),
        "down": Linear({"mlp.down_proj": c.hidden}, c.intermediate, c.bias),
    }


def _norm(c: gpt.GPTConfig, name: str) -> LayerNorm:
    return LayerNorm(name, c.hidden, offset=FAMILIES[c.architecture].norm_offset)

"""GPT-J and CodeGen: attention and MLP in parallel behind one norm; interleaved rotary pairs; a head with a bias.

CodeGen has q, v and k in one tensor, in four parts: a quarter of the heads each."""

from dataclasses import replace

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import deinterleaved_rope
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

CODEGEN_PARTS = 4


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("tie_word_embeddings", False, None)
    hf.int("rotary_dim")  # required
    if hf.architecture == "CodeGenForCausalLM" and (heads := hf.int("n_head")) % CODEGEN_PARTS:
        raise BadCheckpoint(f"{heads} heads cannot be divided into {CODEGEN_PARTS} parts")
    c = gpt.read_config(
        hf,
        rotary=hf,
        activation=read_activation(hf, "activation_function", "gelu_new"),
        eps=hf.float("layer_norm_epsilon", 1e-5),
        parallel=True,
    )
    return replace(c, intermediate=hf.int("n_inner", c.intermediate))


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("wte", config.vocab, config.hidden),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    tensors = gpt.GPTTensors("transformer.", "h", top, layer_specs(config), head_bias=True)
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    assert c.rope is not None
    order = deinterleaved_rope(c.heads, c.head_dim, c.rope.rotary_dim)
    rotated = LinearPart(c.q_size, order)
    qkv = {"attn.q_proj": rotated, "attn.k_proj": rotated, "attn.v_proj": LinearPart(c.q_size)}
    if c.architecture == "CodeGenForCausalLM":
        q, v, k = np.arange(3 * c.q_size, dtype=np.int32).reshape(CODEGEN_PARTS, 3, -1).swapaxes(0, 1)
        fused = np.concatenate([q.ravel()[order], k.ravel()[order], v.ravel()])
        qkv = {"attn.qkv_proj": LinearPart(3 * c.q_size, fused)}
    return {
        "attn_norm": LayerNorm("ln_1", c.hidden),
        "qkv": Linear(qkv, c.hidden),
        "out": Linear({"attn.out_proj": c.hidden}, c.q_size),
        "up": Linear({"mlp.fc_in": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"mlp.fc_out": c.hidden}, c.intermediate, bias=True),
    }

"""Phi-1, 1.5 and 2: attention and MLP in parallel behind one norm, rope on half of each head, a head with a bias."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FUSED = "fused_qkv"  # config key of GGUF files of 2023: q, k and v are one tensor


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf.expect("tie_word_embeddings", False, None)
    return gpt.read_config(
        hf,
        rotary=hf.with_values({"partial_rotary_factor": hf.get("partial_rotary_factor", 0.5)}),
        kv_heads=hf.int("num_key_value_heads", hf.int("num_attention_heads")),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "gelu_new"),
        eps=hf.float("layer_norm_eps", 1e-5),
        parallel=True,
        head_norms=hf.bool("qk_layernorm", False),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": LayerNorm("final_layernorm", config.hidden),
    }
    layer = layer_specs(config, fused=checkpoint.config.bool(FUSED, False))
    return gpt.load_model(
        ops, checkpoint, config, max_model_len, gpt.GPTTensors("model.", "layers", top, layer, head_bias=True)
    )


def layer_specs(c: gpt.GPTConfig, fused: bool) -> TensorSpecs:
    apart = {"self_attn.q_proj": c.q_size, "self_attn.k_proj": c.kv_size, "self_attn.v_proj": c.kv_size}
    qkv = {"self_attn.qkv_proj": c.q_size + 2 * c.kv_size} if fused else apart
    norms = {f"{x}_norm": LayerNorm(f"self_attn.{x}_layernorm", c.head_dim) for x in ("q", "k") if c.head_norms}
    return {
        "attn_norm": LayerNorm("input_layernorm", c.hidden),
        "qkv": Linear(qkv, c.hidden, bias=True),
        **norms,
        "out": Linear({"self_attn.dense": c.hidden}, c.q_size, bias=True),
        "up": Linear({"mlp.fc1": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"mlp.fc2": c.hidden}, c.intermediate, bias=True),
    }

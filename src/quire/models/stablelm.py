"""StableLM: Llama's MLP with layer norms, and rope on a part of each head. 2-12B has attention and MLP in parallel
behind one norm, and a norm for each query and key head."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, HeadLayerNorms, LayerNorm, Linear, LoadedModel, TensorSpec, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

STACKED_NORMS = "stacked_head_norms"  # config key of GGUF files: the norms of all heads are one tensor


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    older = {"partial_rotary_factor": "rope_pct", "layer_norm_eps": "norm_eps"}  # of StableLMEpochForCausalLM
    hf = hf.with_values({key: hf.get(own) for key, own in older.items() if own in hf and key not in hf})
    return gpt.read_config(
        hf,
        rotary=hf.with_values({"partial_rotary_factor": hf.get("partial_rotary_factor", 0.25)}),
        kv_heads=hf.int("num_key_value_heads", hf.int("num_attention_heads")),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "silu"),
        eps=hf.float("layer_norm_eps", 1e-5),
        bias=hf.bool("use_qkv_bias", False),
        gated=True,
        parallel=hf.bool("use_parallel_residual", False),
        head_norms=hf.bool("qk_layernorm", False),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_tokens", config.vocab, config.hidden),
        "norm": LayerNorm("norm", config.hidden),
    }
    layer = layer_specs(config, stacked=checkpoint.config.bool(STACKED_NORMS, False))
    return gpt.load_model(ops, checkpoint, config, max_model_len, gpt.GPTTensors("model.", "layers", top, layer))


def layer_specs(c: gpt.GPTConfig, stacked: bool) -> TensorSpecs:
    qkv = {"self_attn.q_proj": c.q_size, "self_attn.k_proj": c.kv_size, "self_attn.v_proj": c.kv_size}
    specs: dict[str, TensorSpec] = {
        "attn_norm": LayerNorm("input_layernorm", c.hidden),
        "qkv": Linear(qkv, c.hidden, c.bias),
        "out": Linear({"self_attn.o_proj": c.hidden}, c.q_size),
        "up": Linear({"mlp.gate_proj": c.intermediate, "mlp.up_proj": c.intermediate}, c.hidden),
        "down": Linear({"mlp.down_proj": c.hidden}, c.intermediate),
    }
    if not c.parallel:
        specs |= {"mlp_norm": LayerNorm("post_attention_layernorm", c.hidden)}
    if c.head_norms:
        norm = "self_attn.{}_layernorm" if stacked else "self_attn.{}_layernorm.norms.{{}}"
        specs |= {
            "q_norm": HeadLayerNorms(norm.format("q"), c.heads, c.head_dim),
            "k_norm": HeadLayerNorms(norm.format("k"), c.kv_heads, c.head_dim),
        }
    return specs

"""GPT-NeoX and Pythia: attention and MLP in parallel, each behind its own norm, or one after the other; rope on a part
of each head; q, k and v are stored head by head."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import ungrouped_qkv
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    rotary = {
        "rope_theta": hf.get("rope_theta", hf.float("rotary_emb_base", 10_000.0)),
        "partial_rotary_factor": hf.get("partial_rotary_factor", hf.float("rotary_pct", 0.25)),
    }
    return gpt.read_config(
        hf,
        rotary=hf.with_values(rotary),
        intermediate=hf.int("intermediate_size"),
        activation=read_activation(hf, "hidden_act", "gelu"),
        eps=hf.float("layer_norm_eps", 1e-5),
        bias=hf.bool("attention_bias", True),
        parallel=hf.bool("use_parallel_residual", True),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("embed_in", config.vocab, config.hidden),
        "norm": LayerNorm("final_layer_norm", config.hidden),
    }
    layer = layer_specs(config, by_head=not checkpoint.config.bool(gpt.QKV_UNGROUPED, False))
    head = "embed_out" if "embed_out.weight" in checkpoint.names() else "lm_head"  # before and since transformers 5
    return gpt.load_model(
        ops, checkpoint, config, max_model_len, gpt.GPTTensors("gpt_neox.", "layers", top, layer, head)
    )


def layer_specs(c: gpt.GPTConfig, by_head: bool) -> TensorSpecs:
    qkv = LinearPart(3 * c.q_size, ungrouped_qkv(c.heads, c.heads, c.head_dim), already_ordered=not by_head)
    return {
        "attn_norm": LayerNorm("input_layernorm", c.hidden),
        "qkv": Linear({"attention.query_key_value": qkv}, c.hidden, bias=c.bias),
        "out": Linear({"attention.dense": c.hidden}, c.q_size, bias=c.bias),
        "mlp_norm": LayerNorm("post_attention_layernorm", c.hidden),
        "up": Linear({"mlp.dense_h_to_4h": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"mlp.dense_4h_to_h": c.hidden}, c.intermediate, bias=True),
    }

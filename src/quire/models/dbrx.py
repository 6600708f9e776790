"""DBRX: MoE with layer norms without biases, and with q, k and v clipped.

The matrices of all experts lie below each other in one tensor, [experts * expert size, hidden], the down projection's
as well. GGUF files have a matrix for each expert."""

from collections.abc import Container

from quire.models import llama, moe
from quire.models.expert_rows import ExpertRows
from quire.models.layer_patterns import full_attention
from quire.models.llama_families import translate
from quire.models.loading import ExpertLinear, Linear, LoadedModel, TensorSpecs
from quire.models.moe import MoeConfig
from quire.models.moe_families import MoeFamily
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import Keep, OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

FAMILY = MoeFamily(
    windows=full_attention,
    layer_norm=True,
    norm_bias=False,
    fused_qkv=True,
    renamed={
        "transformer.wte.": "model.embed_tokens.",
        "transformer.norm_f.": "model.norm.",
        "transformer.blocks.": "model.layers.",
        ".norm_attn_norm.norm_1.": ".input_layernorm.",
        ".norm_attn_norm.norm_2.": ".post_attention_layernorm.",
        ".norm_attn_norm.attn.Wqkv.": ".self_attn.qkv_proj.",
        ".norm_attn_norm.attn.out_proj.": ".self_attn.o_proj.",
    },
)


def config(hf: CheckpointConfig) -> MoeConfig:
    attention, experts = hf.section("attn_config"), hf.section("ffn_config")
    activation = experts.section("ffn_act_fn").expect("name", "silu", None)
    normalized = experts.expect("moe_normalize_expert_weights", 1, 1.0, None)  # the p of a norm
    values = {
        "hidden_size": hf.int("d_model"),
        "num_hidden_layers": hf.int("n_layers"),
        "num_attention_heads": hf.int("n_heads"),
        "num_key_value_heads": attention.int("kv_n_heads", 1),
        "max_position_embeddings": hf.int("max_seq_len"),
        "intermediate_size": experts.int("ffn_hidden_size"),
        "num_experts": experts.int("moe_num_experts"),
        "num_experts_per_tok": experts.int("moe_top_k", 1),
        "norm_topk_prob": normalized is not None,
        "hidden_act": activation or "silu",
        "rms_norm_eps": 1e-5,  # of layer norms: no configuration has it
        "rope_theta": attention.get("rope_theta"),
    }
    fields = moe.config_fields(translate(hf.with_values(values), FAMILY), FAMILY)
    return MoeConfig(**fields, clip_qkv=attention.float("clip_qkv", 0.0))


def load(ops: OpSet, checkpoint: Checkpoint, config: MoeConfig, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    layers = [layer_specs(config, set(checkpoint.names()))] * config.layers
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, moe.MoeLayer, moe.feed_forward)


def layer_specs(c: MoeConfig, stored: Container[str]) -> TensorSpecs:
    rows = (c.num_experts, c.expert_size, c.hidden)
    experts: TensorSpecs = {
        "experts_gate_up": ExpertRows(("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"), *rows),
        "experts_down": ExpertRows(("ffn.experts.mlp.w2",), *rows, transposed=True),
    }
    if "model.layers.0.ffn.experts.0.w1.weight" in stored:
        gate_up = dict.fromkeys(("ffn.experts.{}.w1", "ffn.experts.{}.v1"), c.expert_size)
        experts = {
            "experts_gate_up": ExpertLinear(gate_up, c.hidden, c.num_experts),
            "experts_down": ExpertLinear({"ffn.experts.{}.w2": c.hidden}, c.expert_size, c.num_experts),
        }
    router = Linear({"ffn.router.layer": c.num_experts}, c.hidden, keep=Keep.ALL)
    return {**moe.attention_specs(c), "router": router, **experts}

"""The rows of names.py for DeepSeek V2 and V3 (GGUF's `deepseek2`), GLM-4.7-Flash and Youtu, V3.2, GLM-5 and Mistral 4.

Files written since April 2025 have kv_b_proj as two tensors, that of the keys transposed head by head: `split_kv_b`, a
key that Hugging Face's configurations do not have, says so. Their head lengths are those of the latent; the lengths of
heads have keys of their own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
from quire.weights.gguf.derived_config import layer_count
from quire.weights.gguf.shared_names import EXPERTS, NEXTN_TENSORS, SHARED_EXPERTS, SIGMOID

DEEPSEEK_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    # From which `_deepseek` derives others.
    "key_length": "attention.key_length",
    "value_length": "attention.value_length",
    "key_length_mla": "attention.key_length_mla",
    "value_length_mla": "attention.value_length_mla",
    "gating": "expert_gating_func",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
}

DEEPSEEK_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    **EXPERTS,
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **SHARED_EXPERTS,
    **NEXTN_TENSORS,
}
SPLIT_KV_B = GGUFVariant({"split_kv_b": True}, {"attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj"})


def mla_sizes(config: CheckpointConfig) -> dict[str, Any]:
    key_length = config.int("key_length_mla" if "key_length_mla" in config else "key_length")
    return {
        "qk_nope_head_dim": key_length - config.int("qk_rope_head_dim"),
        "v_head_dim": config.int("value_length_mla" if "value_length_mla" in config else "value_length"),
    }


def _deepseek(config: CheckpointConfig) -> dict[str, Any]:
    """The architecture, the sizes of heads, and YaRN's scale of scores."""
    derived: dict[str, Any]
    if "n_routed_experts" not in config:
        derived = {"architectures": ["YoutuForCausalLM"]}
    elif config.get("gating") == SIGMOID:
        derived = {"architectures": ["DeepseekV3ForCausalLM"]}
    else:
        derived = {"topk_method": "group_limited_greedy" if config.int("n_group", 1) > 1 else "greedy"}
    derived["num_hidden_layers"] = layer_count(config)
    derived |= mla_sizes(config)
    if (scaling := config.get("rope_scaling")) and scaling["rope_type"] == "yarn":
        # DeepSeek's mscale and mscale_all_dim are both ten times the file's value, and cancel out in cos and sin.
        mscale = {"mscale_all_dim": 10 * config.float("yarn_log_multiplier", 0.0)}
        derived["rope_scaling"] = scaling | mscale | {"attention_factor": 1.0}
    return derived


def _named(name: str) -> Callable[[CheckpointConfig], dict[str, Any]]:
    return lambda config: _deepseek(config) | {"architectures": [name]}


def _mistral4(config: CheckpointConfig) -> dict[str, Any]:
    derived = _deepseek(config) | {"architectures": ["Mistral4ForCausalLM"]}
    scaling = derived.get("rope_scaling") or config.dict("rope_scaling", default={})
    return derived | {"rope_scaling": scaling | {"llama_4_scaling_beta": config.float("temperature_scale", 0.0)}}


DEEPSEEK = GGUFArchitecture(
    name="DeepseekV2ForCausalLM",
    keys=DEEPSEEK_KEYS,
    constants={"model_type": "deepseek_v2", "hidden_act": "silu"},
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    layer_tensors=DEEPSEEK_LAYER,
    derive=_deepseek,
    variants={
        "exp_probs_b": GGUFVariant({"gating": SIGMOID}),  # some files of GLM-4.7-Flash do not have the key
        "attn_k_b": SPLIT_KV_B,
    },
)
INDEX_NAMES = {"k_norm": "k_norm", "proj": "weights_proj", "attn_k": "wk", "attn_q_b": "wq_b"}
INDEXED = replace(
    DEEPSEEK,
    keys={
        **DEEPSEEK_KEYS,
        "index_topk": "attention.indexer.top_k",
        "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length",
    },
    layer_tensors={
        **DEEPSEEK_LAYER,
        **{f"indexer.{theirs}": f"self_attn.indexer.{ours}" for theirs, ours in INDEX_NAMES.items()},
    },
)

DEEPSEEK_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "deepseek2": DEEPSEEK,
    "deepseek32": replace(INDEXED, derive=_named("DeepseekV32ForCausalLM")),
    "glm-dsa": replace(INDEXED, derive=_named("GlmMoeDsaForCausalLM")),
    "mistral4": replace(
        DEEPSEEK,
        keys={**DEEPSEEK_KEYS, "temperature_scale": "attention.temperature_scale"},
        derive=_mistral4,
    ),
}
